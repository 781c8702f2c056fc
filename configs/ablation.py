"""Tables of runs: which part of a ConvBERT is worth what, with the noise of seeds beside it.

Not one run but many, so it is started by launch/sweep.py, not by main.py. The text after the colon
is NAME, or NAME,SIZE with a size of SIZES; tiny is what two CPU cores can do in hours.

    python launch/sweep.py --config=configs/ablation.py:kernel_size --plan
    python launch/sweep.py --config=configs/ablation.py:kernel_size --workdir=runs/kernel_size
    python launch/sweep.py --config=configs/ablation.py:mixers,small \\
        --config.data.source='text:FOLDER/*.txt' --finetune='text:trec --config.task.folder=FOLDER'

bnk_gl_sdconv: table 1 of the ConvBERT paper, whose numbers are not public in text: bottleneck,
grouped feed-forward, dynamic or span-based convolution, hidden size. kernel_size: its figure of 1
to 17 taps. mixers: every mixer, at equal tokens and again at equal FLOPs. objectives: replaced
tokens, masked words, one after the other, replacements drawn evenly, and replaced tokens with
DeBERTaV3's sharing of embeddings (gdes). generator_size: ELECTRA's figure, and a shared one.
pretrained_convolutions: whether convolutions profit of pre-training as attention does (Tay et al.,
2021); needs --finetune. pretrained_sequences: the same of encoder-decoders, by span corruption and
text to text, as that paper has it. translation: attention, light, dynamic and span-based dynamic
convolution in encoder and decoder (Wu et al., 2019), scored by BLEU; small is iwslt_de_en, base
wmt_en_de_big of configs/translation.py; needs --config.parallel.source. length: time and memory of
rows of 64 to 4,096 tokens, of every mixer. search: head ratio, share of convolution heads, kernel
size, groups and feed-forward, chosen by Optuna among encoders of no more parameters and FLOPs than
the config's.
"""

from convbert_jax.config.mixers import MIXERS
from convbert_jax.config.sequences.sizes import DECODER_KERNELS, ENCODER_KERNELS
from convbert_jax.sweeps import Row, Search, Sweep, SweepError

# The second width of bnk_gl_sdconv, as fields of config.model. A generator of heads that head_ratio
# divides must be left.
SIZES = {
    "tiny": {"hidden_size": 192, "ffn_size": 768},
    "small": {"hidden_size": 384, "heads": 8, "ffn_size": 1_536},
    "base": {"hidden_size": 1_152, "ffn_size": 4_608},
}
_KEPT = {"checkpoint.keep": 2}  # one may be damaged by a kill


def get_sweep(name: str = "mixers") -> Sweep:
    name, _, size = name.partition(",")
    if name not in SWEEPS:
        raise SweepError(f"there is no sweep {name}; choose one of: {', '.join(SWEEPS)}.")
    if size and size not in SIZES:
        raise SweepError(f"{name} has no size {size}; choose one of: {', '.join(SIZES)}.")
    return SWEEPS[name](size or "tiny")


def _bnk_gl_sdconv(size: str) -> Sweep:
    mixers = {
        "attention": {"model.mixer": "attention"},
        "bnk": {"model.mixer": "bottleneck"},
        "bnk-dconv": {"model.mixer": "mixed", "model.mixer_fields": ("filters=dynamic",)},
        "bnk-sdconv": {"model.mixer": "mixed"},
    }
    widths = {"": {}, "-wide": {f"model.{name}": v for name, v in SIZES[size].items()}}
    groups = {"": {}, "-gl": {"model.ffn_groups": 2}}
    return _of_size(
        size,
        {
            f"{mixer}{group}{width}": Row({**mixers[mixer], **groups[group], **widths[width]})
            for width in widths
            for group in groups
            for mixer in mixers
        },
        purpose="Bottleneck (bnk), groups (gl), dynamic (dconv) or span-based (sdconv) convolution "
        "and width: what does each of them give?",
    )


def _kernel_size(size: str) -> Sweep:
    return _of_size(
        size,
        {f"k{k}": Row({"model.kernel_size": k}) for k in range(1, 18, 2)},
        baseline="k9",
        purpose="How many taps does the span-based dynamic convolution want?",
    )


def _mixers(size: str) -> Sweep:
    others = [name for name in MIXERS if name != "attention"]
    return _of_size(
        size,
        {
            "attention": Row({"model.mixer": "attention"}),
            **{name: Row({"model.mixer": name}) for name in others},
            **{
                f"{name}-equal-flops": Row({"model.mixer": name}, flops_of="attention")
                for name in others
            },
        },
        purpose="Which mixer learns most, of equal tokens and of equal FLOPs?",
    )


def _objectives(size: str) -> Sweep:
    return _of_size(
        size,
        {
            "rtd": Row(),
            "mlm": Row({"recipe": "masked_lm"}),
            "mlm-then-rtd": Row(parts={"objective.masked_lm_steps": 0.5}),
            "rtd-gdes": Row({"generator.disentangle_embeddings": True}),
            "uniform": Row({"generator.kind": "uniform"}),
        },
        purpose="Replaced tokens, masked words, half of the steps each, replacements drawn evenly, "
        "or embeddings whose gradients are kept apart? Held-out numbers of different objectives do "
        "not compare: name tasks with --finetune.",
    )


def _generator_size(size: str) -> Sweep:
    sizes = {"quarter": 1 / 4, "half": 1 / 2, "whole": 1.0}
    if size == "base":  # 12 heads, of which an even number must be left
        sizes = {"sixth": 1 / 6, "third": 1 / 3, "two-thirds": 2 / 3, "whole": 1.0}
    return _of_size(
        size,
        {
            **{name: Row({"generator.size": value}) for name, value in sizes.items()},
            "shared": Row({"generator.kind": "shared"}),
        },
        baseline={"tiny": "half", "small": "quarter", "base": "third"}[size],
        purpose="How large should the generator be?",
    )


def _pretrained_convolutions(size: str) -> Sweep:
    return _of_size(
        size,
        {
            name: Row({"model.mixer": name, "recipe": "masked_lm"})
            for name in ("attention", "light", "dynamic", "dilated")
        },
        from_scratch=True,
        purpose="Do convolutions profit of pre-training as attention does?",
    )


def _pretrained_sequences(size: str) -> Sweep:
    """Of the sizes of configs/span_corruption.py; small is in between. In the shape of the paper
    convolutions have no positions.
    """
    shape, widths, alone = "tiny", {}, {}
    if size == "small":
        widths = {"hidden_size": 256, "embedding_size": 256, "ffn_size": 1_024, "layers": 8}
    elif size == "base":
        shape, alone = "t5_base", {"sequence.positions": "none"}
    return Sweep(
        config=f"configs/span_corruption.py:{shape},attention",
        rows={
            "attention": Row(),
            **{
                mixer: Row({"model.mixer": mixer, **alone})
                for mixer in ("light", "dynamic", "dilated")
            },
        },
        changes={**_KEPT, **{f"model.{name}": value for name, value in widths.items()}},
        from_scratch=True,
        purpose="Do encoder-decoders of convolutions profit of pre-training as those of attention "
        "do?",
    )


def _length(size: str) -> Sweep:
    """Batches of 8,192 tokens each, some steps for the clock; nothing is learned."""
    lengths = [2**power for power in range(6, 13)]
    return Sweep(
        config=f"configs/{size}.py",
        rows={
            f"{mixer}-{length}": Row(
                {
                    "model.mixer": mixer,
                    "model.positions": length,
                    "data.length": length,
                    "train.batch_size": 8_192 // length,
                }
            )
            for length in lengths
            for mixer in MIXERS
        },
        changes={
            "train.steps": 20,
            "train.log_every": 10,
            "train.eval_every": 20,
            "train.eval_rows": 2,
            "checkpoint.every": 20,
            "checkpoint.keep": 1,
            "optimizer.warmup_steps": 1,
        },
        metrics=("tokens_per_second", "host_memory", "device_memory"),
        purpose="Time and memory of a step against the length of a row, 8,192 tokens a step.",
    )


def _search(size: str) -> Sweep:
    width = {"tiny": 512, "small": 1_024, "base": 3_072}[size]
    shares = {0.25: ("convolution_share=0.25",), 0.5: (), 0.75: ("convolution_share=0.75",)}
    return _of_size(
        size,
        {"as-published": Row()},
        search=Search(
            space={
                "model.head_ratio": (1, 2, 4),
                "model.mixer_fields": tuple(shares.values()),
                "model.kernel_size": tuple(range(3, 18, 2)),
                "model.ffn_groups": (1, 2, 4),
                "model.ffn_size": tuple(width * part // 4 for part in (2, 4, 6, 8)),
            },
            rows=30,
            metric="discriminator_auc",
            maximize=True,
            within="as-published",
        ),
        purpose="Is there a better encoder of at most as many parameters and FLOPs?",
    )


def _of_size(size: str, rows: dict[str, Row], **fields) -> Sweep:
    return Sweep(config=f"configs/{size}.py", rows=rows, changes=_KEPT, **fields)


def _translation(size: str) -> Sweep:
    """Of the sizes of configs/translation.py. Beyond tiny, light and dynamic convolutions have the
    published windows and one more layer in the encoder, with which parameters are about equal.
    """
    sizes = {"tiny": "tiny", "small": "iwslt_de_en", "base": "wmt_en_de_big"}

    def row(mixer, layers):
        if size == "tiny":
            return Row({"model.mixer": mixer, "model.kernel_size": 7})
        windows = {
            "model.layers": layers,
            "model.kernel_sizes": ENCODER_KERNELS[-layers:],
            "sequence.decoder_kernel_sizes": DECODER_KERNELS,
        }
        return Row({"model.mixer": mixer, **windows})

    return Sweep(
        config=f"configs/translation.py:{sizes[size]},attention",
        rows={
            "attention": Row({}),
            "light": row("light", 7),
            "dynamic": row("dynamic", 7),
            "span_dynamic": row("span_dynamic", 6),
        },
        purpose="Do convolutions translate as well as attention, of equal width and about as many "
        "parameters?",
    )


SWEEPS = {
    "bnk_gl_sdconv": _bnk_gl_sdconv,
    "kernel_size": _kernel_size,
    "mixers": _mixers,
    "objectives": _objectives,
    "generator_size": _generator_size,
    "pretrained_convolutions": _pretrained_convolutions,
    "pretrained_sequences": _pretrained_sequences,
    "translation": _translation,
    "length": _length,
    "search": _search,
}
