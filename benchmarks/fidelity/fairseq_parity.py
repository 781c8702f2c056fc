"""Largest difference between fairseq models and their conversions to this package.

    pip download --no-deps fairseq==0.12.2 && tar xzf fairseq-0.12.2.tar.gz
    pip install --target=deps --no-deps omegaconf==2.3.0 hydra-core==1.3.2 sacrebleu==2.4.3 \
        antlr4-python3-runtime==4.9.3 portalocker tabulate colorama bitarray lxml regex
    PYTHONPATH=fairseq-0.12.2:deps python -m benchmarks.fidelity.fairseq_parity

Random weights (layer norms around 1), four pairs of random ids, float32 on the CPU. Sources are
left-padded for fairseq and right-padded here. Texts come from fairseq's SequenceGenerator, beam 4.
"""

import argparse
import dataclasses
import inspect
import tempfile
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from benchmarks import timing
from convbert_jax.decoding import search
from convbert_jax.interop.fairseq import FairseqModel, read

LIGHT = {"encoder_conv_type": "lightweight", "decoder_conv_type": "lightweight"}
DYNAMIC = {"encoder_conv_type": "dynamic", "decoder_conv_type": "dynamic"}
JOINED = {"share_all_embeddings": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
PRE = {"encoder_normalize_before": True, "decoder_normalize_before": True}
ALONE = {"tokens_per_sample": 64, "decoder_normalize_before": True}
# architecture, further options, saved form: args, cfg as a dict, cfg as omegaconf
CASES = (
    ("lightconv_iwslt_de_en", LIGHT, "args"),
    ("lightconv_iwslt_de_en", DYNAMIC, "cfg"),
    ("lightconv_wmt_en_de_big", LIGHT | JOINED, "omegaconf"),
    ("lightconv_wmt_en_de_big", DYNAMIC | JOINED, "args"),
    (
        "lightconv_wmt_zh_en_big",
        DYNAMIC | {"decoder_kernel_size_list": [4, 4, 6, 8, 31, 31]},
        "args",
    ),
    ("lightconv", DYNAMIC | PRE | LEARNED | {"share_decoder_input_output_embed": True}, "cfg"),
    ("transformer_iwslt_de_en", {}, "cfg"),
    ("transformer_wmt_en_de_big_t2t", JOINED, "omegaconf"),
    ("transformer", LEARNED | {"activation_fn": "gelu"}, "args"),
    ("lightconv_lm", DYNAMIC | ALONE | {"share_decoder_input_output_embed": True}, "args"),
)
# Options that fairseq's parser adds to every command line.
PARSED = {
    "weight_softmax": True, "dropout": 0.1, "attention_dropout": 0.1, "relu_dropout": 0.0,
    "no_token_positional_embeddings": False, "source_lang": "de", "target_lang": "en",
    "max_source_positions": 64, "max_target_positions": 64,
    "share_decoder_input_output_embed": False,
}  # fmt: skip
SOURCES, TARGETS, BEAM, LONGEST = (8, 5, 3, 6), (5, 8, 3, 7), 4, 20
BEGIN, PAD = 2, 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64, help="layer width; 0: published")
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)))
    arguments = parser.parse_args()
    allow_mutable_defaults()
    columns = ("convolution", "saved as", "encoder", "logits", "texts equal", "scores")
    table = timing.Table("architecture", *columns)
    for number in arguments.cases:
        arch, said, form = CASES[number]
        with tempfile.TemporaryDirectory() as folder:
            model, dictionaries = make(Path(folder), arch, said, form, arguments.width)
            shown = compare(model, dictionaries, read(Path(folder)))
        kind = said.get("decoder_conv_type", "-")
        table.add(arch, kind, form, *shown)


def allow_mutable_defaults() -> None:
    """Makes fairseq 0.12 importable: its dataclass defaults are rejected since Python 3.11."""
    source = inspect.getsource(dataclasses._get_field)
    start = source.index("    # For real fields, disallow mutable defaults.")
    without = source[:start] + source[source.index("    return f", start) :]
    exec(without, dataclasses.__dict__)


def make(folder: Path, arch: str, said: dict, form: str, width: int):
    """Returns a fairseq model with its dictionaries, saved in the format of its trainer."""
    import fairseq.models.lightconv_lm  # noqa: F401
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
    from omegaconf import OmegaConf

    alone = arch.endswith("_lm")
    sizes = {}
    if width:
        for side in ("decoder",) if alone else ("encoder", "decoder"):
            sizes |= {f"{side}_embed_dim": width, f"{side}_ffn_embed_dim": 2 * width}
    task_name = "language_modeling" if alone else "translation"
    a = argparse.Namespace(arch=arch, task=task_name, **PARSED | sizes | said)
    ARCH_CONFIG_REGISTRY[arch](a)

    def dictionary(words):
        made = Dictionary()
        for i in range(words):
            made.add_symbol(f"w{i}{'@@' * (i % 2)}", words - i)
        made.finalize(padding_factor=8)
        return made

    target = dictionary(500)
    source = target if said.get("share_all_embeddings") else dictionary(611)
    task = types.SimpleNamespace(
        source_dictionary=source, target_dictionary=target, dictionary=target,
        output_dictionary=target,
    )  # fmt: skip
    torch.manual_seed(0)
    model = ARCH_MODEL_REGISTRY[arch].build_model(a, task).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
    state = {"model": model.state_dict(), "args": a, "cfg": None, "extra_state": {"epoch": 1}}
    if form != "args":
        cfg = convert_namespace_to_omegaconf(a)
        state |= {"args": None, "cfg": cfg if form == "omegaconf" else OmegaConf.to_container(cfg)}
    torch.save(state, folder / "model.pt")
    names = ("dict.txt",) if alone else ("dict.de.txt", "dict.en.txt")
    dictionaries = (target,) if alone else (source, target)
    for name, made in zip(names, dictionaries, strict=True):
        made.save(str(folder / name))
    return model, dictionaries


def compare(model, dictionaries, found: FairseqModel) -> list[str]:
    """Returns the differences of a table row."""
    for theirs, ours in zip(dictionaries, found.dictionaries, strict=True):
        assert tuple(theirs.symbols) == ours.entries
    rng = np.random.default_rng(0)
    targets = [[BEGIN, *rng.integers(4, len(dictionaries[-1]), n)] for n in TARGETS]
    tokens, real = pad(targets, left=False)
    ours, ids = found.build(), real.astype(np.int32)
    if len(dictionaries) == 1:
        with torch.no_grad():
            logits = model.decoder(torch.tensor(tokens))[0].numpy()
        return ["-", largest(ours(jnp.asarray(tokens), ids), logits, real, real), "-", "-"]
    sources = [[*rng.integers(4, len(dictionaries[0]), n), BEGIN] for n in SOURCES]
    (lefts, there), (rights, here) = (pad(sources, left) for left in (True, False))
    given = {
        "src_tokens": torch.tensor(lefts),
        "src_lengths": torch.tensor([len(text) for text in sources]),
    }
    with torch.no_grad():
        encoded = model.encoder(**given)["encoder_out"]
        encoded = encoded[0] if isinstance(encoded, list) else encoded
        logits = model(**given, prev_output_tokens=torch.tensor(tokens))[0].numpy()
    seen = jnp.asarray(here, jnp.int32)
    rights = jnp.asarray(rights)
    differences = [
        largest(ours.encode(rights, seen), encoded.transpose(0, 1).numpy(), here, there),
        largest(ours(rights, seen, jnp.asarray(tokens), ids), logits, real, real),
    ]
    return [*differences, *compare_texts(model, dictionaries[-1], given, ours, rights, seen)]


def compare_texts(model, dictionary, given, ours, rights, seen) -> list[str]:
    """Returns the number of equal texts of a beam and the largest score difference."""
    from fairseq.sequence_generator import SequenceGenerator

    generator = SequenceGenerator(
        [model], dictionary, beam_size=BEAM, max_len_a=0, max_len_b=LONGEST, min_len=0
    )
    with torch.no_grad():
        theirs = generator.generate([model], {"net_input": given})
    rows, length = len(rights), LONGEST + 2

    @jax.jit
    def run(params):
        network = nnx.merge(nnx.graphdef(ours), params)
        state, kept = network.start(rights, seen, copies=BEAM, length=length)
        return search(
            lambda *at: network.step(*at, kept), state, jnp.full((rows, 1), BEGIN), beam=BEAM,
            length=length, end=BEGIN, pad=PAD, never=[PAD],
        )  # fmt: skip

    found, same, scores = run(nnx.state(ours)), 0, [0.0]
    for row, best in enumerate(theirs):
        wanted = {tuple(text["tokens"].tolist()): float(text["score"]) for text in best}
        for beam in range(BEAM):
            text = tuple(found.tokens[row, beam, 1 : found.lengths[row, beam]].tolist())
            if text in wanted:
                same += 1
                scores.append(abs(wanted[text] - float(found.scores[row, beam])))
    return [f"{same} of {rows * BEAM}", f"{max(scores):.1e}"]


def pad(texts, left: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded rows and the mask of their tokens."""
    longest = max(map(len, texts))
    rows = [
        [PAD] * (longest - len(t)) + t if left else t + [PAD] * (longest - len(t)) for t in texts
    ]
    return np.array(rows), np.array(rows) != PAD


def largest(ours, theirs: np.ndarray, here: np.ndarray, there: np.ndarray) -> str:
    return f"{np.abs(np.asarray(ours)[here] - theirs[there]).max():.1e}"


if __name__ == "__main__":
    main()
