"""Export of an encoder to StableHLO with `jax.export`, for servers without this package.

FOLDER/encoder.mlir             portable StableHLO bytecode for cpu, cuda and tpu
FOLDER/encoder.jax_export       the same program, serialized for `jax.export.deserialize`
FOLDER/parameters.safetensors   the parameters by path; they precede the inputs in the arguments
FOLDER/signature.json           all arguments in order
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from jax import export
from safetensors.numpy import load_file

from convbert_jax.config import EncoderConfig
from convbert_jax.interop.networks import ConversionError, Network, make_modules, stack, to_tree
from convbert_jax.interop.weight_files import save_arrays
from convbert_jax.training.partitioning import flatten_params

PLATFORMS = ("cpu", "cuda", "tpu")
INPUTS = ("tokens", "segment_ids", "type_ids")  # int32 [batch, length]


def write(folder: Path, network: Network) -> None:
    """Writes the encoder, which maps token ids to hidden states.

    The inputs are three int32 arrays [batch, length], see INPUTS; the output is float32
    [batch, length, hidden_size]. Both dimensions are symbolic; length is at most
    `network.embeddings.positions`.

    Raises:
      ConversionError: the package flatbuffers is not installed.
    """
    longest = network.embeddings.positions
    folder.mkdir(parents=True, exist_ok=True)
    graphdef = nnx.graphdef(make_modules(network.embeddings, _in_plain_xla(network.encoder), {}))
    flat = {
        path: leaf
        for path, leaf in stack(network.parameters, network.encoder).items()
        if path.startswith(("embeddings/", "encoder/"))
    }
    params = to_tree(flat)

    def encode(params, tokens, segment_ids, type_ids):
        parts = nnx.merge(graphdef, params)
        return parts["encoder"](parts["embeddings"](tokens, segment_ids, type_ids), segment_ids)

    limits = ["length >= 1", f"length <= {longest}"]
    batch, length = export.symbolic_shape("batch, length", constraints=limits)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    exported = export.export(jax.jit(encode), platforms=PLATFORMS)(abstract, ids, ids, ids)
    try:
        serialized = exported.serialize()
    except ModuleNotFoundError as error:
        raise ConversionError(
            f"StableHLO export needs the package {error.name}. Run pip install {error.name}."
        ) from error
    (folder / "encoder.jax_export").write_bytes(serialized)
    (folder / "encoder.mlir").write_bytes(exported.mlir_module_serialized)
    ordered = {path: np.asarray(leaf) for path, leaf in flatten_params(params).items()}
    save_arrays(folder / "parameters.safetensors", ordered)
    signature = {
        "platforms": PLATFORMS,
        "arguments": [
            *({"name": path, "dtype": "float32", "shape": leaf.shape} for path, leaf in
              ordered.items()),
            *({"name": name, "dtype": "int32", "shape": ["batch", "length"]} for name in INPUTS),
        ],
        "results": [
            {"dtype": "float32", "shape": ["batch", "length", network.encoder.hidden_size]}
        ],
    }  # fmt: skip
    (folder / "signature.json").write_text(json.dumps(signature, indent=1) + "\n")
    logging.info("Exported StableHLO for %s, up to %d tokens a row.", ", ".join(PLATFORMS), longest)


def _in_plain_xla(encoder: EncoderConfig) -> EncoderConfig:
    """Returns the encoder without custom kernels: they need one platform and static shapes."""
    return encoder.with_mixers(attention="xla", convolution="xla")


def load(folder: Path):
    """Loads an exported folder as a function (tokens, segment_ids, type_ids) -> hidden states."""
    exported = export.deserialize((folder / "encoder.jax_export").read_bytes())
    params = to_tree(load_file(folder / "parameters.safetensors"))
    return lambda *ids: exported.call(params, *(jnp.asarray(x, jnp.int32) for x in ids))
