"""What torch.save wrote, its zip archives and the single files before PyTorch 1.6, without PyTorch.

The archive has ROOT/data.pkl, the numbers in ROOT/data/KEY, and a CRC of each. A single file is
four pickles in a row (a number that says what it is, a version, the machine, the content), a list
of keys, and for each of them how many numbers and the numbers; nothing there tells damage.
"""

import contextlib
import dataclasses
import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from convbert_jax.interop.claims import check_memory, shown
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.pytorch import pickles
from convbert_jax.interop.pytorch.pickles import Made, Name, PickleError, first_line

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
_LARGEST_PICKLE = 1 << 26  # bytes, without the numbers
_MOST_DIMENSIONS = 32
_SHARED = 4  # how often a stored number may be in tensors: tied ones are stored once
_DTYPES = {
    "Float": np.dtype("<f4"),
    "Half": np.dtype("<f2"),
    "Double": np.dtype("<f8"),
    "BFloat16": np.dtype(ml_dtypes.bfloat16),
    "Long": np.dtype("<i8"),
    "Int": np.dtype("<i4"),
    "Short": np.dtype("<i2"),
    "Char": np.dtype("i1"),
    "Byte": np.dtype("u1"),
    "Bool": np.dtype("bool"),
}


@dataclasses.dataclass(frozen=True)
class Storage:
    """A row of numbers in a file."""

    key: str
    dtype: np.dtype | None  # None: of a type that is not read
    size: int

    @property
    def bytes(self) -> int:
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A part of a storage; `Checkpoint.read` makes arrays of them."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in numbers


class Checkpoint:
    """One file; numbers are read when they are asked for.

    Attributes:
      path: of the file.
      content: what was saved: plain values, `Tensor` for tensors, `Made` for other objects.
    """

    def __init__(self, path: Path):
        """Reads all but the numbers.

        Raises:
          ConversionError: the file cannot be read, is damaged, or was not written by torch.save.
        """
        self.path = path
        self._storages: dict[str, Storage] = {}
        with _refusing(path):
            if not path.is_file():
                raise PickleError("it is not a plain file" if path.exists() else "no such file")
            self._size = path.stat().st_size
            check_memory(self._size, path)
            with path.open("rb") as file:
                self._zipped = file.read(4) == b"PK\x03\x04"
                file.seek(0)
                self.content = self._open_archive(file) if self._zipped else self._open_single(file)

    def read(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Arrays of tensors, by name; floating ones as float32, which is exact for 16 bits.

        Raises:
          ConversionError: the file is damaged, or a tensor is float64 or of an unknown type.
        """
        with _refusing(self.path):
            if sum(math.prod(tensor.shape) for tensor in tensors.values()) > _SHARED * self._size:
                raise PickleError("its tensors are larger than the file")
            for name, tensor in tensors.items():
                if tensor.storage.dtype in (None, _DTYPES["Double"]):
                    raise PickleError(f"{shown(name)} is of a type that is not exact in float32")
            wanted = {tensor.storage.key: tensor.storage for tensor in tensors.values()}
            with self.path.open("rb") as file:
                read = self._read_archive if self._zipped else self._read_single
                kept = dict(read(file, wanted))
            return {
                name: _view(kept[tensor.storage.key], tensor) for name, tensor in tensors.items()
            }

    def _open_archive(self, file: IO[bytes]) -> Any:
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            names = {part.filename: part for part in parts}
            found = [name for name in names if name.endswith("/data.pkl")]
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise PickleError("its parts are compressed")
            if sum(part.file_size for part in parts) > self._size:
                raise PickleError("its parts are larger than the file")
            if len(found) != 1 or len(names) < len(parts):
                raise PickleError("it is a zip archive that torch.save did not write")
            self._root = found[0].removesuffix("data.pkl")
            order = f"{self._root}byteorder"
            if order in names and archive.read(order) != b"little":
                raise PickleError("its numbers are big-endian")
            if names[found[0]].file_size > _LARGEST_PICKLE:
                raise PickleError("its pickle is larger than that of any model")
            return pickles.load(io.BytesIO(archive.read(found[0])), _make, self._find)

    def _read_archive(
        self, file: IO[bytes], wanted: Mapping[str, Storage]
    ) -> Iterator[tuple[str, np.ndarray]]:
        with zipfile.ZipFile(file) as archive:
            for key, storage in wanted.items():
                part = f"{self._root}data/{key}"
                if archive.getinfo(part).file_size != storage.bytes:
                    raise PickleError(f"its part {shown(key)} has not the size of its tensors")
                yield key, np.frombuffer(archive.read(part), storage.dtype)

    def _open_single(self, file: IO[bytes]) -> Any:
        try:
            magic = pickles.load(file)
        except PickleError:
            magic = None
        if magic != _MAGIC:
            raise PickleError("it is not a file of torch.save")
        version, machine = pickles.load(file), pickles.load(file)
        if version != _VERSION or not isinstance(machine, dict):
            raise PickleError(f"its format is not {_VERSION}, the one that is read")
        if machine.get("little_endian") is not True:
            raise PickleError("its numbers are big-endian")
        content = pickles.load(file, _make, self._find)
        keys = pickles.load(file)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise PickleError("its list of storages is damaged")
        if len(set(keys)) < len(keys) or set(keys) != set(self._storages):
            raise PickleError("its storages are not those of its tensors")
        self._places = dict(self._place(file, keys))
        return content

    def _place(self, file: IO[bytes], keys: list[str]) -> Iterator[tuple[str, int]]:
        """Where the numbers of each storage begin, which lie one behind the other."""
        for key in keys:
            storage, head = self._storages[key], file.read(8)
            if storage.dtype is None:
                raise PickleError("it has numbers of an unknown type")
            if head != struct.pack("<q", storage.size):
                raise PickleError(f"its storage {shown(key)} has not the size of its tensors")
            yield key, file.tell()
            if file.seek(storage.bytes, io.SEEK_CUR) > self._size:
                raise PickleError("it ends too early")
        if file.tell() != self._size:
            raise PickleError("it goes on behind its end")

    def _read_single(
        self, file: IO[bytes], wanted: Mapping[str, Storage]
    ) -> Iterator[tuple[str, np.ndarray]]:
        for key, storage in wanted.items():
            file.seek(self._places[key])
            yield key, np.frombuffer(file.read(storage.bytes), storage.dtype)

    def _find(self, place: Any) -> Storage:
        """A storage of ("storage", type, key, device, size), in single files with None behind."""
        if (
            not isinstance(place, tuple)
            or not 5 <= len(place) <= 6
            or place[5:] not in ((), (None,))
        ):
            raise PickleError("its pickle names a storage in an unknown way")
        kind, named, key, _, size = place[:5]
        if kind != "storage" or not isinstance(named, Name) or not isinstance(key, str):
            raise PickleError("its pickle names a storage in an unknown way")
        if type(size) is not int or not 0 <= size <= self._size:
            raise PickleError(f"its storage {shown(key)} is larger than the file")
        storage = Storage(key, _DTYPES.get(named.name.rpartition(".")[2][: -len("Storage")]), size)
        if self._storages.setdefault(key, storage) != storage:
            raise PickleError(f"its storage {shown(key)} has two sizes")
        return storage


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Makes one sentence of what goes wrong with a file."""
    try:
        yield
    except (
        *(OSError, ValueError, KeyError, EOFError, RuntimeError, NotImplementedError),
        *(OverflowError, MemoryError, struct.error, zipfile.BadZipFile, zlib.error),
    ) as error:
        reason = error.strerror if isinstance(error, OSError) else ""
        raise ConversionError(
            f"{path} cannot be read safely ({reason or first_line(error)}); it is damaged, or "
            "holds more than a model, copy it again."
        ) from None


def _make(name: str, arguments: tuple) -> Any:
    if name == "torch._utils._rebuild_parameter" and arguments:
        return arguments[0]
    if name not in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2"):
        return Made(name, arguments)
    if len(arguments) < 4:
        raise PickleError("a tensor is described in an unknown way")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, Storage) or not all(
        isinstance(found, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in found)
        for found in ((offset,), shape, strides)
    ):
        raise PickleError("a tensor is described in an unknown way")
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if len(shape) > _MOST_DIMENSIONS or (math.prod(shape) and last >= storage.size):
        raise PickleError(f"a tensor of {shown(shape)} does not fit into its storage")
    return Tensor(storage, offset, shape, strides)


def _view(numbers: np.ndarray, tensor: Tensor) -> np.ndarray:
    """The tensor, in memory of its own."""
    if not math.prod(tensor.shape):
        array = np.zeros(tensor.shape, numbers.dtype)
    else:
        strides = tuple(numbers.itemsize * stride for stride in tensor.strides)
        array = np.lib.stride_tricks.as_strided(numbers[tensor.offset :], tensor.shape, strides)
    floating = array.dtype.kind in "fV"
    return np.array(array, np.float32 if floating else array.dtype, order="C")
