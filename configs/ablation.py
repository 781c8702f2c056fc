"""Sweeps that measure the effect of parts of ConvBERT, with several seeds.

Started by launch/sweep.py, not by main.py. The text after the colon is NAME, or NAME,SIZE with a
size of SIZES; tiny takes hours on two CPU cores.

    python launch/sweep.py --config=configs/ablation.py:kernel_size --plan
    python launch/sweep.py --config=configs/ablation.py:kernel_size --workdir=runs/kernel_size
    python launch/sweep.py --config=configs/ablation.py:mixers,small \\
        --config.data.source='text:FOLDER/*.txt' --finetune='text:trec --config.task.folder=FOLDER'

bnk_gl_sdconv: table 1 of the ConvBERT paper: bottleneck, grouped feed-forward, dynamic or
    span-based convolution, hidden size.
kernel_size: figure of the ConvBERT paper, kernels of 1 to 17.
mixers: all mixers, at equal tokens and at equal FLOPs.
modern: seven blocks, from ELECTRA's to ModernBERT's with the convolutions of ConvBERT and LFM2, at
    equal FLOPs; masked words, and replaced tokens with the suffix -rtd.
objectives: replaced-token detection, masked LM, one after the other, uniform replacements, and
    gradient-disentangled embedding sharing (DeBERTaV3).
generator_size: figure of the ELECTRA paper, and a generator that shares the discriminator.
pretrained_convolutions: whether convolutions gain as much from pre-training as attention (Tay et
    al., 2021). Needs --finetune.
pretrained_sequences: the same for encoder-decoders, with span corruption and text to text.
translation: attention, light, dynamic and span-based dynamic convolution in encoder and decoder
    (Wu et al., 2019), scored by BLEU; small is iwslt_de_en, base wmt_en_de_big of
    configs/translation.py. Needs --config.parallel.source.
length: time and memory of all mixers for sequences of 64 to 4,096 tokens.
search: head ratio, share of convolution heads, kernel size, groups and feed-forward size, chosen by
    Optuna among encoders with no more parameters and FLOPs than the config's.
"""

from configs.written import DECODER_KERNELS, ENCODER_KERNELS
from convbert_jax.config.mixers import MIXERS
from convbert_jax.sweeps import Search, Sweep, SweepError, Variant

# The second width of bnk_gl_sdconv, as fields of config.model. head_ratio must divide the heads of
# the generator.
SIZES = {
    "tiny": {"hidden_size": 192, "ffn_size": 768},
    "small": {"hidden_size": 384, "heads": 8, "ffn_size": 1_536},
    "base": {"hidden_size": 1_152, "ffn_size": 4_608},
}
_CHECKPOINTS = {"checkpoint.keep": 2}  # two, because a kill may damage the newest


def get_sweep(name: str = "mixers") -> Sweep:
    name, _, size = name.partition(",")
    if name not in SWEEPS:
        raise SweepError(f"Unknown sweep {name!r}; choose one of: {', '.join(SWEEPS)}.")
    if size and size not in SIZES:
        raise SweepError(f"Unknown size {size!r} of {name}; choose one of: {', '.join(SIZES)}.")
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
            f"{mixer}{group}{width}": Variant({**mixers[mixer], **groups[group], **widths[width]})
            for width in widths
            for group in groups
            for mixer in mixers
        },
        purpose="What is the effect of the bottleneck (bnk), groups (gl), dynamic (dconv) or "
        "span-based (sdconv) convolution, and width?",
    )


def _kernel_size(size: str) -> Sweep:
    return _of_size(
        size,
        {f"k{k}": Variant({"model.kernel_size": k}) for k in range(1, 18, 2)},
        baseline="k9",
        purpose="Which kernel size of the span-based dynamic convolution is best?",
    )


def _mixers(size: str) -> Sweep:
    others = [name for name in MIXERS if name != "attention"]
    return _of_size(
        size,
        {
            "attention": Variant({"model.mixer": "attention"}),
            **{name: Variant({"model.mixer": name}) for name in others},
            **{
                f"{name}-equal-flops": Variant({"model.mixer": name}, match_flops_of="attention")
                for name in others
            },
        },
        purpose="Which mixer is best at equal tokens and at equal FLOPs?",
    )


def _modern(size: str) -> Sweep:
    """The gated units have two thirds of the feed-forward size, and so about as many parameters
    (Shazeer, 2020).
    """
    block = {
        "model.activation": "geglu",
        "model.ffn_size": {"tiny": 344, "small": 688, "base": 2_048}[size],
        "model.norm": "pre",
        "model.biases": False,
        "model.position_embedding": "rotary",
        "model.window": {"tiny": 16, "small": 64, "base": 64}[size],
        "model.types": 0,
    }
    blocks = {
        "electra": {"model.mixer": "attention"},
        "convbert": {"model.mixer": "mixed"},
        "modern": {**block, "model.mixer": "attention"},
        "modern-mixed": {**block, "model.mixer": "mixed"},
        "modern-span_dynamic": {**block, "model.mixer": "span_dynamic"},
        "modern-short": {**block, "model.mixer": "short", "model.kernel_size": 3},
        "modern-canon": {**block, "model.mixer": "attention", "model.canon": "ABCD"},
    }
    recipes = {"": "masked_lm", "-rtd": "replaced_token"}
    return _of_size(
        size,
        {
            f"{name}{suffix}": Variant(
                {**changes, "recipe": recipe},
                match_flops_of="" if f"{name}{suffix}" == "electra" else "electra",
            )
            for suffix, recipe in recipes.items()
            for name, changes in blocks.items()
        },
        purpose="Which block is best at equal FLOPs? Compare masked words and replaced tokens by "
        "tasks, with --finetune.",
    )


def _objectives(size: str) -> Sweep:
    return _of_size(
        size,
        {
            "rtd": Variant(),
            "mlm": Variant({"recipe": "masked_lm"}),
            "mlm-then-rtd": Variant({"objective.masked_lm_steps": "50%"}),
            "rtd-gdes": Variant({"generator.disentangle_embeddings": True}),
            "uniform": Variant({"generator.kind": "uniform"}),
        },
        purpose="Which pre-training objective is best? Held-out metrics of different objectives "
        "are not comparable: compare tasks with --finetune.",
    )


def _generator_size(size: str) -> Sweep:
    sizes = {"quarter": 1 / 4, "half": 1 / 2, "whole": 1.0}
    if size == "base":  # the generator needs an even number of the 12 heads
        sizes = {"sixth": 1 / 6, "third": 1 / 3, "two-thirds": 2 / 3, "whole": 1.0}
    return _of_size(
        size,
        {
            **{name: Variant({"generator.size": value}) for name, value in sizes.items()},
            "shared": Variant({"generator.kind": "shared"}),
        },
        baseline={"tiny": "half", "small": "quarter", "base": "third"}[size],
        purpose="How large should the generator be?",
    )


def _pretrained_convolutions(size: str) -> Sweep:
    return _of_size(
        size,
        {
            name: Variant({"model.mixer": name, "recipe": "masked_lm"})
            for name in ("attention", "light", "dynamic", "dilated")
        },
        from_scratch=True,
        purpose="Do convolutions gain as much from pre-training as attention?",
    )


def _pretrained_sequences(size: str) -> Sweep:
    """Sizes of configs/span_corruption.py; small is in between. As in the paper, convolutions have
    no position embeddings in size base.
    """
    shape, widths, positions = "tiny", {}, {}
    if size == "small":
        widths = {"hidden_size": 256, "embedding_size": 256, "ffn_size": 1_024, "layers": 8}
    elif size == "base":
        shape, positions = "t5_base", {"model.position_embedding": "none"}
    return Sweep(
        config=f"configs/span_corruption.py:{shape},attention",
        variants={
            "attention": Variant(),
            **{
                mixer: Variant({"model.mixer": mixer, **positions})
                for mixer in ("light", "dynamic", "dilated")
            },
        },
        changes={**_CHECKPOINTS, **{f"model.{name}": value for name, value in widths.items()}},
        from_scratch=True,
        purpose="Do convolutional encoder-decoders gain as much from pre-training as those with "
        "attention?",
    )


def _length(size: str) -> Sweep:
    """Batches of 8,192 tokens, with few steps: for time and memory only."""
    lengths = [2**power for power in range(6, 13)]
    return Sweep(
        config=f"configs/{size}.py",
        variants={
            f"{mixer}-{length}": Variant(
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
        purpose="How do time and memory of a step of 8,192 tokens depend on the sequence length?",
    )


def _search(size: str) -> Sweep:
    width = {"tiny": 512, "small": 1_024, "base": 3_072}[size]
    shares = {0.25: ("convolution_share=0.25",), 0.5: (), 0.75: ("convolution_share=0.75",)}
    return _of_size(
        size,
        {"as-published": Variant()},
        search=Search(
            space={
                "model.head_ratio": (1, 2, 4),
                "model.mixer_fields": tuple(shares.values()),
                "model.kernel_size": tuple(range(3, 18, 2)),
                "model.ffn_groups": (1, 2, 4),
                "model.ffn_size": tuple(width * part // 4 for part in (2, 4, 6, 8)),
            },
            trials=30,
            metric="discriminator_auc",
            maximize=True,
            budget_of="as-published",
        ),
        purpose="Is there a better encoder with at most as many parameters and FLOPs?",
    )


def _of_size(size: str, variants: dict[str, Variant], **fields) -> Sweep:
    return Sweep(config=f"configs/{size}.py", variants=variants, changes=_CHECKPOINTS, **fields)


def _translation(size: str) -> Sweep:
    """Sizes of configs/translation.py. Except in tiny, light and dynamic convolutions have the
    published kernel sizes and one more encoder layer, so that parameters are about equal.
    """
    sizes = {"tiny": "tiny", "small": "iwslt_de_en", "base": "wmt_en_de_big"}

    def variant(mixer, layers):
        if size == "tiny":
            return Variant({"model.mixer": mixer, "model.kernel_size": 7})
        kernels = {
            "model.layers": layers,
            "model.kernel_sizes": ENCODER_KERNELS[-layers:],
            "sequence.decoder_kernel_sizes": DECODER_KERNELS,
        }
        return Variant({"model.mixer": mixer, **kernels})

    return Sweep(
        config=f"configs/translation.py:{sizes[size]},attention",
        variants={
            "attention": Variant({}),
            "light": variant("light", 7),
            "dynamic": variant("dynamic", 7),
            "span_dynamic": variant("span_dynamic", 6),
        },
        purpose="Do convolutions translate as well as attention at equal width and about equal "
        "parameters?",
    )


SWEEPS = {
    "bnk_gl_sdconv": _bnk_gl_sdconv,
    "kernel_size": _kernel_size,
    "mixers": _mixers,
    "modern": _modern,
    "objectives": _objectives,
    "generator_size": _generator_size,
    "pretrained_convolutions": _pretrained_convolutions,
    "pretrained_sequences": _pretrained_sequences,
    "translation": _translation,
    "length": _length,
    "search": _search,
}
