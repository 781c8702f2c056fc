"""Reader and writer of weight files in Hugging Face folders; safetensors need no PyTorch."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from convbert_jax.interop import pytorch
from convbert_jax.interop.claims import check_memory, first_line, read_json, shown
from convbert_jax.interop.networks import ConversionError

SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_FILES = (SAFETENSORS, SAFETENSORS_INDEX, PICKLED, PICKLED_INDEX)  # the first that exists is read
_NUMPY_TYPES = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
_MOST_TENSORS = 1 << 16
_LONGEST_NAME = 255  # bytes of a file name


def are_in(folder: Path) -> bool:
    """Returns whether a folder has a file that `read_weights` reads."""
    return any((folder / name).is_file() for name in _FILES)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a folder by name, floating-point ones as float32 (without rounding).

    Reads model.safetensors, or pytorch_model.bin with `interop.pytorch`; both may be sharded.

    Raises:
      ConversionError: the folder has no weights, or they cannot be read.
    """
    file = next((name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ConversionError(
            f"{folder} contains no weights: expected {' or '.join(_FILES)}.", path=folder
        )
    read = _read_safetensors if file in (SAFETENSORS, SAFETENSORS_INDEX) else _read_pickled
    if file in (SAFETENSORS, PICKLED):
        tensors = read(folder / file)
    else:
        tensors = _read_shards(folder / file, read)
    wide = [name for name, array in tensors.items() if array.dtype == np.float64]
    if wide:
        raise ConversionError(
            f"{folder}: {wide[0]} is float64, which is not exact in float32. Save the model as "
            "float32 first.",
            field=wide[0],
            path=folder,
        )
    return {
        name: array.astype(np.float32) if array.dtype.kind in "fV" else array
        for name, array in tensors.items()
    }


def write_weights(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes model.safetensors with the metadata that PyTorch libraries expect."""
    ordered = {name: tensors[name] for name in sorted(tensors)}
    save_arrays(path / SAFETENSORS, ordered, {"format": "pt"})


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file.

    Raises:
      OSError: the file cannot be written.
    """
    # save_file ignores strides and writes the memory of an array in order.
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    try:
        save_file(whole, path, metadata)
    except safetensors.SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if not number:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    tensors = {}
    try:
        check_memory(path.stat().st_size, path)
        with safetensors.safe_open(path, framework="numpy") as file:
            names = file.keys()
            if len(names) > _MOST_TENSORS:
                raise ValueError(f"{len(names)} tensors")
            kinds = {name: file.get_slice(name).get_dtype() for name in names}
            strange = [name for name in names if kinds[name] not in _NUMPY_TYPES | {"BF16"}]
            if strange:
                raise ValueError(
                    f"{shown(strange[0])} has the unsupported type {kinds[strange[0]]}"
                )
            for name, kind in kinds.items():
                if kind in _NUMPY_TYPES:
                    tensors[name] = file.get_tensor(name)
        others = [name for name in kinds if name not in tensors]
        if others:
            with safetensors.safe_open(path, framework="flax") as file:  # supports bfloat16
                tensors |= {
                    name: np.asarray(file.get_tensor(name).astype(np.float32)) for name in others
                }
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise ConversionError(
            f"Cannot read {path}: {first_line(error)}. It is damaged or not a safetensors file; "
            "copy it again.",
            path=path,
        ) from error
    return tensors


def _read_shards(
    index: Path, read_file: Callable[[Path], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
        raise ConversionError(f"{index} is not an index of shards. Copy it again.", path=index)
    tensors: dict[str, np.ndarray] = {}
    files = {name: index.parent / name for name in sorted(set(table.values()))}
    for name, path in files.items():
        if Path(name).name != name or len(name.encode()) > _LONGEST_NAME:
            raise ConversionError(
                f"{index} names the shard {shown(name)}, which is not a file name in its folder.",
                value=name,
                path=index,
            )
        if not path.is_file():
            raise ConversionError(
                f"{index} names the shard {name}, which does not exist. Copy it too.",
                value=name,
                path=index,
            )
    check_memory(sum(path.stat().st_size for path in files.values()), index)
    for path in files.values():
        read = read_file(path)
        twice = sorted(read.keys() & tensors.keys())
        if twice:
            raise ConversionError(
                f"{path} and another shard both contain {shown(twice[0])}. Copy the shards again.",
                field=twice[0],
                path=path,
            )
        tensors |= read
    missing = sorted(set(table) - set(tensors))
    if missing:
        raise ConversionError(
            f"{index} lists {shown(missing[0])}, but no shard contains it. Copy the shards again.",
            field=missing[0],
            path=index,
        )
    return tensors


def _read_pickled(path: Path) -> dict[str, np.ndarray]:
    return pytorch.to_arrays(path, pytorch.read(path))
