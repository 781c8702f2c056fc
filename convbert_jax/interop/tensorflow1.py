"""Checkpoints of the official ConvBERT, ELECTRA and BERT code (TensorFlow 1), without TensorFlow.

They contain no config; sizes are derived from shapes. A checkpoint contains discriminator,
generator and heads. It also contains Adam's moments and the step, unless its publisher removed
them.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import logging

from convbert_jax.config import EncoderConfig
from convbert_jax.config.mixers import AttentionOptions
from convbert_jax.interop import tensor_bundle
from convbert_jax.interop.networks import (
    ConversionError,
    Network,
    check_block,
    check_same_layers,
    describe_sizes,
    shapes,
)
from convbert_jax.interop.tables import export_error, tensorflow_places
from convbert_jax.interop.tensor_bundle import Bundle, write_bundle
from convbert_jax.interop.weight_files import (
    LARGEST,
    LEAST_PARAMETERS,
    check_finite,
    read_json,
    shown,
)
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.mixed import Mixed

STEP = "global_step"
SLOTS = ("/adam_m", "/adam_v")  # suffixes of AdamWeightDecayOptimizer in the official code
EPSILON = 1e-12  # of all layer norms
_FAMILIES = ("convbert", "electra", "bert")  # the ones with an official TensorFlow code
_HEAD_SIZE = 64  # of all published ELECTRA and BERT models
_TABLE = "embeddings/word_embeddings"
_STEPS = (np.dtype("<i8"), np.dtype("<i4"))
_WEIGHTS = tuple(np.dtype(kind) for kind in ("f4", "f2", ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Content of a checkpoint.

    Attributes:
      networks: "main" and, optionally, "generator".
      ignored: names of variables that the networks lack.
      step: training step, 0 if unknown.
      moments: Adam's first and second moments, structured like `networks`; None if any is missing,
        NaN or infinite.
    """

    networks: Mapping[str, Network]
    ignored: tuple[str, ...]
    step: int
    moments: tuple[Mapping[str, Network], Mapping[str, Network]] | None


@dataclasses.dataclass(frozen=True)
class _Scopes:
    """Variable scopes of a network."""

    family: str
    encoder: str
    embeddings: str
    heads: tuple[str, ...]  # names in this package


def find_prefix(path: Path) -> Path | None:
    """Finds the prefix of a checkpoint.

    Args:
      path: the prefix, a file of the checkpoint, or a folder with one checkpoint.

    Returns:
      the prefix, or None if there is no checkpoint.

    Raises:
      ConversionError: it is a V1 checkpoint, or a folder with several checkpoints.
    """
    if path.is_dir():
        return _find_in_folder(path)
    name = re.sub(r"\.(index|meta|data-\d{5}-of-\d{5})$", "", path.name)
    prefix = path.with_name(name)
    if prefix.with_name(name + ".index").is_file() or (path.is_file() and path != prefix):
        return prefix
    if path.is_file():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 64))
            if tensor_bundle.is_table(file.read()):
                raise ConversionError(
                    f"{path} is a TensorFlow checkpoint in V1 format. Convert it with "
                    "tf.compat.v1.train.Saver(write_version=tf.compat.v1.train.SaverDef.V2).",
                    path=path,
                )
    return None


def _find_in_folder(folder: Path) -> Path | None:
    files = (path for path in folder.glob("*.index") if path.is_file())
    found = sorted(path.name.removesuffix(".index") for path in files)
    try:
        with (folder / "checkpoint").open(errors="replace") as file:
            state = file.read(1 << 16)
        newest = re.search(r'^model_checkpoint_path: "(.*)"', state, re.MULTILINE)
    except OSError:
        newest = None
    if newest and Path(newest[1]).name in found:
        return folder / Path(newest[1]).name
    if len(found) > 1:
        raise ConversionError(
            f"{folder} contains {len(found)} checkpoints: {', '.join(found)}. Name one of them.",
            path=folder,
        )
    return folder / found[0] if found else None


def read_checkpoint(prefix: Path) -> Checkpoint:
    """Reads all networks of a checkpoint.

    Raises:
      ConversionError: the checkpoint is damaged or contains another model.
    """
    bundle = Bundle(prefix)
    names = set(bundle.names())
    networks, used = {}, set()
    scopes = _find_scopes(names, prefix)
    for name, where in scopes.items():
        family, embeddings, encoder, outputs = _sizes(bundle, where, prefix)
        expected = shapes(embeddings, encoder, outputs)
        places = _places(expected, where, encoder)
        parameters = {}
        for path, place in places.items():
            parameters[path] = _read(bundle, place, expected[path], prefix)
        used |= {place.name for place in places.values()}
        check_finite(parameters, str(prefix))
        networks[name] = Network(family, embeddings, encoder, parameters)
    moments = None
    if all(variable + slot in names for variable in used for slot in SLOTS):
        moments = tuple(_read_moments(bundle, networks, scopes, slot) for slot in SLOTS)
        try:
            for slot, part in zip(SLOTS, moments, strict=True):
                for network in part.values():
                    check_finite(network.parameters, f"{prefix}, {slot},")
        except ConversionError as error:  # the weights are usable without moments
            logging.warning("Ignored Adam's moments: %s", error)
            moments = None
        used |= {variable + slot for variable in used for slot in SLOTS}
    step = 0
    if STEP in names:
        used.add(STEP)
        step = read_step(bundle)
    return Checkpoint(networks, tuple(sorted(names - used)), step, moments)


def read_step(bundle: Bundle) -> int:
    """Reads the training step of a checkpoint.

    Raises:
      ConversionError: the variable is not an integer from 0 to 2^31 - 1.
    """
    entry = bundle.entry(STEP)
    step = int(bundle.read(STEP)) if entry.shape == () and entry.dtype in _STEPS else -1
    if not 0 <= step < 1 << 31:
        raise ConversionError(
            f"{bundle.prefix} has an invalid {STEP}: expected an integer from 0 to 2^31 - 1.",
            field=STEP,
            path=bundle.prefix,
        )
    return step


def write_checkpoint(
    prefix: Path,
    networks: Mapping[str, Network],
    *,
    step: int,
    moments: tuple[Mapping[str, Network], Mapping[str, Network]] | None = None,
) -> None:
    """Writes PREFIX.index, PREFIX.data-* and `checkpoint` for the official code.

    Reads the files back and compares all arrays.

    Raises:
      ConversionError: the official code has no variable for a parameter, two different arrays map
        to the same variable, or an array does not read back as written.
    """
    tensors: dict[str, np.ndarray] = {STEP: np.asarray(step, np.int64)}
    for suffix, group in (("", networks), *zip(SLOTS, moments or ({}, {}), strict=True)):
        for name, network in group.items():
            for variable, array in _to_variables(network, name, networks).items():
                if variable + suffix in tensors and not np.array_equal(
                    tensors[variable + suffix], array
                ):
                    raise ConversionError(
                        f"Two different arrays map to the variable {variable}.", field=variable
                    )
                tensors[variable + suffix] = array
    write_bundle(prefix, tensors)
    (prefix.parent / "checkpoint").write_text(f'model_checkpoint_path: "{prefix.name}"\n')
    bundle = Bundle(prefix)
    for name, array in tensors.items():
        if bundle.read(name).tobytes() != array.tobytes():
            raise ConversionError(
                f"{prefix} does not read back as it was written; the first differing variable is "
                f"{name}. Check the disk and the memory of this machine, then export again.",
                field=name,
                path=prefix,
            )
    logging.info("Wrote and read back %d variables, all bitwise equal.", len(tensors))


def check_expressible(network: Network) -> None:
    """Checks that the official code can compute a network.

    Raises:
      ConversionError: it cannot; the message has the reason and a fix.
    """
    why = export_error(network.layer.mixer, "tensorflow1", network.layer.hidden_size)
    if why:
        raise ConversionError(why)
    check_block(network, _FAMILIES, "the official TensorFlow code")
    if network.layer.layer_norm_epsilon != EPSILON:
        raise ConversionError(
            f"config.model.layer_norm_epsilon={network.layer.layer_norm_epsilon:g} differs from "
            f"{EPSILON:g}, the only value of the official TensorFlow code. Export with "
            "--format=huggingface or stablehlo.",
            field="config.model.layer_norm_epsilon",
            value=network.layer.layer_norm_epsilon,
        )


def _to_variables(network: Network, name: str, weights) -> dict[str, np.ndarray]:
    """Converts a network to variables.

    Args:
      network: a network, or its moments.
      weights: the networks with weights, which determine the parts that they share.
    """
    check_expressible(network)
    scope, embeddings = "electra", "electra"
    if network.family == "bert":
        scope = embeddings = "bert"
    elif name == "generator" and not _same(weights[name], weights["main"], "layers/"):
        scope = "generator"
        if not _same(weights[name], weights["main"], "embeddings/"):
            embeddings = "generator"
    try:
        places = tensorflow_places(
            network.parameters,
            network.family,
            network.layer,
            scope=scope,
            embeddings_scope=embeddings,
        )
    except KeyError as error:
        raise ConversionError(
            f"The official TensorFlow code has no variable for {error.args[0]}. Export with "
            "--format=huggingface.",
            field=error.args[0],
        ) from None
    return {
        place.name: place.layout.write(np.asarray(network.parameters[path]))
        for path, place in places.items()
    }


def _same(first: Network, second: Network, folder: str) -> bool:
    paths = [path for path in first.parameters if path.startswith(folder)]
    return all(
        path in second.parameters
        and np.array_equal(first.parameters[path], second.parameters[path])
        for path in paths
    )


def _find_scopes(names: set[str], prefix: Path) -> dict[str, _Scopes]:
    mlm, rtd = "mlm_head", "rtd_head"
    if f"bert/{_TABLE}" in names:
        last = {mlm: "cls/predictions/output_bias", "pair_head": "cls/seq_relationship/output_bias"}
        heads = tuple(head for head, name in last.items() if name in names)
        return {"main": _Scopes("bert", "bert", "bert", heads)}
    if f"electra/{_TABLE}" not in names:
        shown = ", ".join(sorted(names)[:3]) or "none"
        raise ConversionError(
            f"{prefix} is not a ConvBERT, ELECTRA or BERT checkpoint of the official code: it has "
            f"no variable electra/{_TABLE} or bert/{_TABLE}. Its first variables: {shown}.",
            path=prefix,
        )
    mixed = any("/conv_attn_key/" in name for name in names)
    family = "convbert" if mixed else "electra"
    detects = "discriminator_predictions/dense/kernel" in names
    predicts = "generator_predictions/output_bias" in names
    own = any(name.startswith("generator/encoder/") for name in names)
    alone = (mlm,) if predicts and not own else ()
    result = {"main": _Scopes(family, "electra", "electra", (rtd,) if detects else alone)}
    if own:
        tied = f"generator/{_TABLE}" not in names
        result["generator"] = _Scopes(
            family, "generator", "electra" if tied else "generator", (mlm,) if predicts else ()
        )
    elif detects and predicts:
        result["generator"] = _Scopes(family, "electra", "electra", (mlm,))
    return result


def _sizes(bundle: Bundle, where: _Scopes, prefix: Path):
    """Derives (family, embeddings, encoder, {head: logits}) from the shapes of variables."""
    names = set(bundle.names())

    def shape(name: str, dimensions: int = 2) -> tuple[int, ...]:
        if name not in names:
            raise ConversionError(
                f"{prefix} is incomplete: it lacks the variable {name}.", field=name, path=prefix
            )
        found = bundle.entry(name).shape
        if len(found) != dimensions or not 0 < min(found) <= max(found) <= LARGEST:
            raise ConversionError(
                f"{prefix} has {name} of the invalid shape {found}.",
                field=name,
                path=prefix,
            )
        return found

    vocab_size, size = shape(f"{where.embeddings}/{_TABLE}")
    positions, _ = shape(f"{where.embeddings}/embeddings/position_embeddings")
    types, _ = shape(f"{where.embeddings}/embeddings/token_type_embeddings")
    pattern = re.compile(rf"{where.encoder}/encoder/layer_(\d+)/")
    depth = len({match[1] for name in names if (match := pattern.match(name))})
    if depth * LEAST_PARAMETERS > len(names):  # before anything is made for each layer
        raise ConversionError(
            f"{prefix} is incomplete: it has too few variables for {depth} layers.", path=prefix
        )
    first = f"{where.encoder}/encoder/layer_0"
    width, hidden = shape(f"{first}/attention/output/dense/kernel")
    groups = 1
    if f"{first}/intermediate/g_dense/kernel" in names:
        groups, _, inner = shape(f"{first}/intermediate/g_dense/kernel", 3)
        ffn_size = groups * inner
    else:
        _, ffn_size = shape(f"{first}/intermediate/dense/kernel")
    mixed = where.family == "convbert"
    if mixed:
        taps, _, _ = shape(f"{first}/attention/self/conv_attn_key/depthwise_kernel", 3)
        _, logits = shape(f"{first}/attention/self/conv_attn_kernel/kernel")
        heads, width = max(1, logits // taps), width // 2
    else:
        heads = _attention_heads(prefix, where, width)
    if width % heads:
        raise ConversionError(
            f"{prefix} has {width} channels, which are not divisible by {heads} heads.", path=prefix
        )
    attention = {"attention_heads": heads, "head_size": width // heads, "attention": "auto"}
    attention |= {"attention_dropout": 0.1, "options": AttentionOptions()}
    mixer = Attention(**attention)
    if mixed:
        mixer = Mixed(
            **attention, convolution_heads=heads, kernel_size=taps, convolution="auto",
            mask_convolution=False,
        )  # fmt: skip
    embeddings, encoder = describe_sizes(
        vocab_size=vocab_size, embedding_size=size, positions=positions, types=types, depth=depth,
        dropout=0.1, epsilon=EPSILON, spread=0.02, hidden_size=hidden, mixer=mixer,
        ffn_size=ffn_size, ffn_groups=groups,
    )  # fmt: skip
    outputs = {head: vocab_size if head == "mlm_head" else 1 for head in where.heads}
    return where.family, embeddings, encoder, outputs


def _attention_heads(prefix: Path, where: _Scopes, width: int) -> int:
    """Returns the number of heads from bert_config.json; by default heads have 64 channels."""
    file = prefix.with_name("bert_config.json")
    if where.encoder != "generator" and file.is_file():
        try:
            heads = read_json(file).get("num_attention_heads")
            if type(heads) is int and 0 < heads <= width:
                return heads
            logging.warning("Ignored invalid num_attention_heads in %s: %s.", file, shown(heads))
        except ConversionError as error:
            logging.warning("%s", error)
    logging.info("Found no number of heads; assuming %d channels per head.", _HEAD_SIZE)
    return max(1, width // _HEAD_SIZE)


def _places(paths, where: _Scopes, encoder: EncoderConfig):
    return tensorflow_places(
        paths,
        where.family,
        check_same_layers(encoder),
        scope=where.encoder,
        embeddings_scope=where.embeddings,
    )


def _read(bundle: Bundle, place, expected: tuple[int, ...], prefix: Path, slot: str = ""):
    name = place.name + slot
    if name not in bundle:
        raise ConversionError(
            f"{prefix} is incomplete: it lacks the variable {name}.", field=name, path=prefix
        )
    theirs = place.layout.write(np.broadcast_to(0.0, expected)).shape
    if bundle.entry(name).shape != theirs:
        raise ConversionError(
            f"{prefix} has {name} of shape {bundle.entry(name).shape}, but the other variables "
            f"require {theirs}.",
            field=name,
            path=prefix,
        )
    check_type(bundle, name)
    return np.ascontiguousarray(place.layout.read(bundle.read(name))).astype(np.float32)


def check_type(bundle: Bundle, name: str) -> None:
    """Checks that a variable is exact in float32.

    Raises:
      ConversionError: it is not.
    """
    if bundle.entry(name).dtype not in _WEIGHTS:
        raise ConversionError(
            f"Variable {name} is {bundle.entry(name).dtype}, which is not exact in float32. Save "
            "the checkpoint as float32 first.",
            field=name,
        )


def _read_moments(bundle: Bundle, networks, scopes, slot: str) -> dict[str, Network]:
    result = {}
    for name, network in networks.items():
        places = _places(network.parameters, scopes[name], network.encoder)
        arrays = {
            path: _read(bundle, place, network.parameters[path].shape, bundle.prefix, slot)
            for path, place in places.items()
        }
        result[name] = dataclasses.replace(network, parameters=arrays)
    return result
