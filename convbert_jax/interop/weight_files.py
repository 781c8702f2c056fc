"""Weight files that may be truncated, corrupted or malicious: safetensors, PyTorch and JSON.

Readers allocate memory and loop only as far as the size of the file justifies, and execute nothing
in a file. An exported folder has a manifest with checksums, because safetensors has none.
"""

import argparse
import contextlib
import io
import json
import os
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import safetensors
from absl import logging
from safetensors.numpy import save_file

from convbert_jax.interop.networks import ConversionError
from convbert_jax.storage import parse_json

_LARGEST_JSON = 1 << 25  # bytes; the largest tokenizer.json of a BERT has 5 million
LARGEST = 1 << 20  # largest accepted model dimension; a larger one means a damaged file
LEAST_PARAMETERS = 8  # tensors of a layer in every family; bounds the layers of a file


def read_json(path: Path, kind: type = dict) -> Any:
    """Reads an untrusted JSON file.

    Args:
      kind: dict or list, the expected content.

    Raises:
      ConversionError: the file is missing, too large, or has another content.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConversionError(f"{path} is not a regular file. Copy it again.", path=path)
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise ConversionError(
                f"{path} has {size:,} bytes, too many for this JSON file. Copy it again.", path=path
            )
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ConversionError(f"{path} cannot be read ({error.strerror}).", path=path) from None
    except ValueError as error:
        raise ConversionError(f"{path} is damaged ({error}). Copy it again.", path=path) from None
    if not isinstance(content, kind):
        raise ConversionError(
            f"{path} is damaged: expected a {kind.__name__}, found {type(content).__name__}.",
            path=path,
        )
    return content


def read_count(
    content: Mapping[str, Any], name: str, default: int | None = None, *, file: str = "config.json"
) -> int:
    """Reads a positive integer of a JSON file.

    Args:
      file: name of the file, for the error message.

    Raises:
      ConversionError: it is missing without a default, or not an integer from 1 to LARGEST.
    """
    value = content.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
        raise ConversionError(
            f"{file} has {name}={shown(value)}, expected an integer from 1 to {LARGEST:,}.",
            field=name,
            value=value,
        )
    return value


def read_fraction(content: Mapping[str, Any], name: str, default: float) -> float:
    """Reads a number of config.json.

    Raises:
      ConversionError: it is not a number of at least 0 and less than 1.
    """
    value = content.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConversionError(
            f"config.json has {name}={shown(value)}, expected a number of at least 0 and less "
            "than 1.",
            field=name,
            value=value,
        )
    return float(value)


def check_memory(size: int, path: Path) -> None:
    """Checks that weights fit into the memory of this machine.

    Args:
      size: bytes of all arrays.

    Raises:
      ConversionError: the weights are larger than the memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ConversionError(
            f"{path} claims {size / 2**30:,.0f} GiB of weights, but this machine has "
            f"{memory / 2**30:,.0f} GiB of memory. Copy the file again or use a larger machine.",
            path=path,
        )


def check_finite(arrays: Mapping[str, np.ndarray], place: str) -> None:
    """Checks that all numbers are finite.

    Args:
      place: the source of the arrays, at the beginning of the message.

    Raises:
      ConversionError: an array contains NaN or infinity.
    """
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        raise ConversionError(
            f"{place} contains NaN or infinity in {len(wrong)} of {len(arrays)} arrays, first in "
            f"{wrong[0]}: training diverged or the file is damaged. Use another checkpoint.",
            field=wrong[0],
        )


def shown(value: Any) -> str:
    """Returns the repr of a value for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def first_line(error: Exception) -> str:
    """Returns the first line of an error message without its period, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


MANIFEST = "exported_by_convbert_jax.json"
_CHECKSUMS, _SOURCE = "crc32c", "source"
_MANIFEST_FORMAT = 2
_CHUNK = 1 << 24  # bytes


def is_export(folder: Path) -> bool:
    """Returns whether a folder was exported by convbert_jax."""
    return (folder / MANIFEST).is_file()


def write_manifest(folder: Path, source: str = "", **said: Any) -> None:
    """Writes the manifest of a complete folder.

    Args:
      source: path of the weights that were exported, kept as a checksum; "" if unknown.
      said: further JSON values, which `read` returns.
    """
    sums = {path.relative_to(folder).as_posix(): _checksum(path) for path in _all_files(folder)}
    content = {"format": _MANIFEST_FORMAT, _CHECKSUMS: sums, **said}
    if source:
        content[_SOURCE] = google_crc32c.value(source.encode())
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")


def check_own_export(folder: Path, source: str) -> None:
    """Checks that an export from `source` may replace `folder` without loss.

    Raises:
      ConversionError: `folder` holds the export of another source, or files in it were added or
        changed after the export.
    """
    if not is_export(folder):
        return
    said, own = read_json(folder / MANIFEST), google_crc32c.value(source.encode())
    if said.get(_SOURCE, own) != own:
        raise ConversionError(
            f"{folder} holds the export of another model. Remove it or use another --output.",
            path=folder,
        )
    sums = said.get(_CHECKSUMS, {})
    # Format 1 has checksums only of the files that `_files` lists.
    for path in (
        _all_files(folder) if said.get("format") == _MANIFEST_FORMAT else _parsed_files(folder)
    ):
        name = path.relative_to(folder).as_posix()
        if sums.get(name) != _checksum(path):
            raise ConversionError(
                f"Cannot replace {folder}: {name} was added or changed after the export. Move that "
                "file and remove the folder, or use another --output.",
                value=name,
                path=folder,
            )


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest of a folder and verifies the checksums.

    A changed JSON file is only a warning, because settings may be edited by hand.

    Returns:
      the content of the manifest; empty if the folder has none.

    Raises:
      ConversionError: the manifest is damaged, or the weights or the vocabulary were changed.
    """
    if not is_export(folder):
        return {}
    said = read_json(folder / MANIFEST)
    sums = said.get(_CHECKSUMS, {})
    if not isinstance(sums, dict):
        raise ConversionError(
            f"{folder / MANIFEST} has {_CHECKSUMS}={shown(sums)}, expected an object. Copy it "
            "again.",
            field=_CHECKSUMS,
            value=sums,
            path=folder / MANIFEST,
        )
    for path in _parsed_files(folder):
        wanted = sums.get(path.relative_to(folder).as_posix())
        if wanted is None or wanted == _checksum(path):
            continue
        if path.suffix == ".json":
            logging.warning("%s was edited or damaged after the export (wrong checksum).", path)
            continue
        raise ConversionError(
            f"{path} is damaged or was changed after the export (wrong checksum). Copy it again, "
            f"or remove {MANIFEST} if you changed it on purpose.",
            path=path,
        )
    return said


def _parsed_files(folder: Path) -> list[Path]:
    """Returns the files that are parsed, without documentation such as the model card."""
    kinds = (".json", ".safetensors", ".model", ".txt")
    return [path for path in _all_files(folder) if path.suffix in kinds]


def _all_files(folder: Path) -> list[Path]:
    found = folder.rglob("*")
    return sorted(path for path in found if path.name != MANIFEST and path.is_file())


def _checksum(path: Path) -> int:
    total = google_crc32c.Checksum()
    with path.open("rb") as file:
        for _ in total.consume(file, _CHUNK):
            pass
    return int.from_bytes(total.digest(), "big")


SAFETENSORS = "model.safetensors"
SAFETENSORS_INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
_WEIGHTS = (SAFETENSORS, SAFETENSORS_INDEX, PICKLED, PICKLED_INDEX)  # the first that exists is read
_NUMPY_TYPES = {"F64", "F32", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"}
_MOST_TENSORS = 1 << 16
_LONGEST_NAME = 255  # bytes of a file name


def has_weights(folder: Path) -> bool:
    """Returns whether a folder has a file that `read_weights` reads."""
    return any((folder / name).is_file() for name in _WEIGHTS)


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a folder by name, floating-point ones as float32 (without rounding).

    Reads model.safetensors, or pytorch_model.bin with `read_pytorch`; both may be sharded.

    Raises:
      ConversionError: the folder has no weights, or they cannot be read.
    """
    file = next((name for name in _WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise ConversionError(
            f"{folder} contains no weights: expected {' or '.join(_WEIGHTS)}.", path=folder
        )
    read = _read_safetensors
    if file in (PICKLED, PICKLED_INDEX):
        read = lambda path: to_arrays(path, read_pytorch(path))  # noqa: E731
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


# Older versions execute crafted files even with weights_only=True (CVE-2025-32434).
_OLDEST_TORCH = (2, 6)
_MOST_TENSORS = 1 << 16
_MOST_VIEWS = 4  # tied tensors and views may use each stored number this often
# Classes in fairseq's files. They are replaced by stand-ins, never imported.
_FOREIGN = re.compile(
    r"omegaconf(\.\w+)+|fairseq(\.\w+)+|typing\.\w+|pathlib\.\w+Path"
    r"|numpy\.dtype|numpy\.(_core|core)\.multiarray\.(scalar|_reconstruct)|numpy\.ndarray"
)
# Types that omegaconf's settings refer to. A file has other names for some of them, as in Python 2.
_BUILTINS = ("dict", "list", "frozenset", "tuple", "int", "float", "str", "bool", "object", "bytes")
_SINGLE_FILE_PICKLES = 4  # magic number, version, system, content; before PyTorch 1.6


class Foreign:
    """Stand-in for an object whose class is not imported.

    Attributes:
      name: MODULE.CLASS of the object's class.
      arguments: arguments that its constructor would have been called with.
      state: its pickled state, usually the dict of its attributes; None if it has no state.
    """

    name = ""

    def __new__(cls, *arguments: Any) -> "Foreign":
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


def read_pytorch(path: Path) -> Any:
    """Reads the content of a file that torch.save wrote.

    Tensors are memory-mapped; `to_arrays` copies them. `argparse.Namespace` is itself, objects of
    fairseq, omegaconf and numpy are `Foreign`.

    Raises:
      ConversionError: the file is damaged or refers to other classes, or PyTorch is not installed.
    """
    torch = _import_torch(path)
    with _pytorch_errors(path), warnings.catch_warnings(action="ignore"):
        if not path.is_file():
            raise ValueError("it is not a file" if path.exists() else "no such file")
        check_memory(path.stat().st_size, path)
        with path.open("rb") as file:
            is_archive = file.read(4) == b"PK\x03\x04"
        if is_archive:
            _check_archive(path)
        names = [name for name in _global_names(path, is_archive) if _FOREIGN.fullmatch(name)]
        names += [f"builtins.{name}" for name in _BUILTINS]
        stand_ins = [(type(name, (Foreign,), {"name": name}), name) for name in names]
        stand_ins += [(argparse.Namespace, "argparse.Namespace")]
        stand_ins += [(lambda *_: {}, "collections.defaultdict")]
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)


def to_arrays(path: Path, tensors: Any) -> dict[str, np.ndarray]:
    """Returns tensors as arrays in memory, 16-bit floats as float32, which is exact.

    Args:
      path: the file that the tensors are from.
      tensors: a dict of tensors by name in the content of the file.

    Raises:
      ConversionError: `tensors` is not such a dict, repeats numbers beyond the size of the file, or
        contains a type that has no exact float32 or integer array.
    """
    torch = _import_torch(path)
    kinds = (torch.Tensor, torch.nn.Parameter)
    with _pytorch_errors(path):
        if not isinstance(tensors, dict) or len(tensors) > _MOST_TENSORS:
            raise ValueError("it contains no table of tensors")
        for name, tensor in tensors.items():
            if not isinstance(name, str) or type(tensor) not in kinds:
                raise ValueError(f"{shown(name)} is not a tensor")
            if tensor.dtype == torch.float64 or tensor.dtype.is_complex:
                raise ValueError(f"{shown(name)} is {tensor.dtype}, which is not exact in float32")
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size > _MOST_VIEWS * path.stat().st_size:
            raise ValueError("its tensors are larger than the file")
        return {name: _to_array(torch, tensor) for name, tensor in tensors.items()}


def _import_torch(path: Path):
    try:
        import torch
    except ImportError:
        found = "it is not installed"
    else:
        found = f"{torch.__version__} is installed"
        if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) >= _OLDEST_TORCH:
            return torch
    raise ConversionError(
        f"{path} needs PyTorch 2.6 or newer: {found}. Run pip install '.[torch]'.",
        path=path,
    )


def _check_archive(path: Path) -> None:
    """Verifies checksums, which torch.load does not do for mapped files, and sizes."""
    with zipfile.ZipFile(path) as archive:
        parts = archive.infolist()
        # torch.save never compresses; a compressed megabyte may unpack to a thousand.
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("its parts are compressed")
        if sum(part.file_size for part in parts) > path.stat().st_size:
            raise ValueError("its parts are larger than the file")
        damaged = archive.testzip()
        if damaged:
            raise ValueError(f"wrong checksum of its part {shown(damaged)}")


def _global_names(path: Path, is_archive: bool) -> set[str]:
    """Returns MODULE.NAME of everything that the pickles of a file refer to."""
    with path.open("rb") as file:
        pickles = [file] * _SINGLE_FILE_PICKLES
        if is_archive:
            with zipfile.ZipFile(file) as archive:
                names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
                pickles = [io.BytesIO(archive.read(name)) for name in names]
        operations = (step for pickle in pickles for step in pickletools.genops(pickle))
        names = [argument for operation, argument, _ in operations if operation.name == "GLOBAL"]
    return {name.replace(" ", ".") for name in names}


def _to_array(torch, tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return np.array(tensor.numpy(), order="C")


@contextlib.contextmanager
def _pytorch_errors(path: Path) -> Iterator[None]:
    """Turns every exception of the readers into a ConversionError."""
    try:
        yield
    except ConversionError:
        raise
    except Exception as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it refers to {shown(name[1])}" if name else first_line(error)
        raise ConversionError(
            f"{path} cannot be read safely: {reason}. It is damaged or not a model; copy it again.",
            path=path,
        ) from error
