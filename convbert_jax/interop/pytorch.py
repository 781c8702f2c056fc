"""Reads PyTorch files with `torch.load(weights_only=True)`; nothing in them is executed."""

import argparse
import contextlib
import io
import pickletools
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.interop.claims import check_memory, first_line, shown
from convbert_jax.interop.networks import ConversionError

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


def read(path: Path) -> Any:
    """Reads the content of a file that torch.save wrote.

    Tensors are memory-mapped; `to_arrays` copies them. `argparse.Namespace` is itself, objects of
    fairseq, omegaconf and numpy are `Foreign`.

    Raises:
      ConversionError: the file is damaged or refers to other classes, or PyTorch is not installed.
    """
    torch = _import_torch(path)
    with _errors(path), warnings.catch_warnings(action="ignore"):
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
    with _errors(path):
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
def _errors(path: Path) -> Iterator[None]:
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
