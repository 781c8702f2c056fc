"""TensorFlow's V2 checkpoint files, PREFIX.index and PREFIX.data-*, read and written without it.

Format: tensorflow/core/util/tensor_bundle/tensor_bundle.h and tensor_bundle.proto. The index is a
table (sorted_table.py) of variable name -> BundleEntryProto, under "" the BundleHeaderProto.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from convbert_jax.interop import sorted_table
from convbert_jax.interop.crc32c import crc32c, mask
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.protobuf_wire import BYTES, FIXED32, VARINT, field, read_fields

# numbers of tensorflow.DataType; of the others only the names are read
DTYPES = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    4: np.dtype("u1"),
    6: np.dtype("i1"),
    9: np.dtype("<i8"),
    10: np.dtype("bool"),
    14: np.dtype(ml_dtypes.bfloat16),
    19: np.dtype("<f2"),
}
_LARGEST_INDEX = 1 << 24  # bytes; 100 variables take some 5,000
_MOST_SHARDS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a variable lies. `dtype` is None for what this reader does not read (strings)."""

    dtype: np.dtype | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    partitioned: bool


class Bundle:
    """A checkpoint; variables are read when they are asked for."""

    def __init__(self, prefix: Path):
        """Reads the index.

        Args:
          prefix: as model.ckpt-1000000.

        Raises:
          ConversionError: the index is absent, damaged, of another version, or does not fit to
            the data files.
        """
        self.prefix = prefix
        path = prefix.with_name(prefix.name + ".index")
        try:
            if path.stat().st_size > _LARGEST_INDEX:
                raise ConversionError(f"{path} is too large for an index; it is something else.")
            content = path.read_bytes()
        except OSError as error:
            raise ConversionError(
                f"{path} cannot be read ({error.strerror}); a TensorFlow checkpoint needs its "
                "index file."
            ) from error
        try:
            self._shards, self._entries = _read_index(content)
        except ValueError as error:
            raise ConversionError(
                f"{path} is damaged: {error}; copy the checkpoint again."
            ) from error
        self._check_files()

    def names(self) -> list[str]:
        """All variables, in order."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        return self._entries[name]

    def read(self, name: str) -> np.ndarray:
        """One variable, its checksum verified.

        Raises:
          ConversionError: it is damaged, partitioned, or of a type that is not read.
        """
        entry = self._entries[name]
        if entry.partitioned:
            raise ConversionError(
                f"variable {name} is partitioned over several tensors; save the checkpoint again "
                "without a partitioner."
            )
        if entry.dtype is None:
            raise ConversionError(f"variable {name} holds no numbers.")
        path = self._data_file(entry.shard)
        with path.open("rb") as file:
            file.seek(entry.offset)
            data = file.read(entry.size)
        if len(data) != entry.size or mask(crc32c(data)) != entry.checksum:
            raise ConversionError(
                f"variable {name} in {path} is damaged (wrong checksum); copy the file again."
            )
        return np.frombuffer(data, entry.dtype).reshape(entry.shape)

    def _data_file(self, shard: int) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.data-{shard:05d}-of-{self._shards:05d}")

    def _check_files(self) -> None:
        sizes = {}
        for shard in sorted({entry.shard for entry in self._entries.values()}):
            path = self._data_file(shard)
            try:
                sizes[shard] = path.stat().st_size
            except OSError as error:
                raise ConversionError(
                    f"{path} cannot be read ({error.strerror}); the checkpoint has "
                    f"{self._shards} data file(s), copy all of them."
                ) from error
        for name, entry in self._entries.items():
            if entry.offset + entry.size > sizes[entry.shard]:
                raise ConversionError(
                    f"{self._data_file(entry.shard)} ends before variable {name}; it is cut off, "
                    "copy it again."
                )
        if sum(entry.size for entry in self._entries.values()) > sum(sizes.values()):
            raise ConversionError(
                f"{self.prefix}.index is damaged: its variables overlap; copy the checkpoint again."
            )


def write_bundle(prefix: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a checkpoint of one data file that TensorFlow's own readers take."""
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    header = field(1, 1) + field(3, field(1, 1))  # one shard, little endian, version 1
    entries, offset = [(b"", header)], 0
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with prefix.with_name(prefix.name + ".data-00000-of-00001").open("wb") as file:
        for name in sorted(tensors, key=str.encode):
            array = np.ascontiguousarray(tensors[name])
            data = array.tobytes()
            shape = b"".join(
                field(2, field(1, size) if size else b"") for size in np.shape(tensors[name])
            )
            entry = field(1, numbers[array.dtype]) + field(2, shape)
            entry += field(4, offset) if offset else b""
            entry += field(5, len(data)) + field(6, mask(crc32c(data)), fixed32=True)
            entries.append((name.encode(), entry))
            file.write(data)
            offset += len(data)
    prefix.with_name(prefix.name + ".index").write_bytes(sorted_table.write_table(entries))


def _read_index(content: bytes) -> tuple[int, dict[str, Entry]]:
    table = sorted_table.read_table(content)
    first = next(table, None)
    if first is None or first[0] != b"":
        raise ValueError("it has no header")
    shards = _read_header(first[1])
    entries = {}
    for key, value in table:
        try:
            name = key.decode()
        except UnicodeDecodeError:
            continue  # the slices of a partitioned variable, whose own entry says so
        entries[name] = _read_entry(value, name, shards)
    return shards, entries


def _read_header(data: bytes) -> int:
    shards = 0
    for number, kind, value in read_fields(data):
        if (number, kind) == (1, VARINT):
            shards = value
        elif (number, kind) == (2, VARINT) and value:
            raise ValueError("it was written on a big-endian machine")
        elif (number, kind) == (3, BYTES):
            for inner, _, least in read_fields(value):
                if inner == 2 and isinstance(least, int) and least > 1:
                    raise ValueError(f"it needs a reader of version {least}, this one is of 1")
    if not 0 < shards <= _MOST_SHARDS:
        if len(data) and not shards:
            raise ValueError("its header is not that of a V2 checkpoint")
        raise ValueError(f"it claims {shards} data files")
    return shards


def _read_entry(data: bytes, name: str, shards: int) -> Entry:
    values = {1: 0, 3: 0, 4: 0, 5: 0, 6: 0}
    shape: tuple[int, ...] = ()
    partitioned = False
    for number, kind, value in read_fields(data):
        if number == 2 and kind == BYTES:
            shape = tuple(_read_shape(value))
        elif number == 7:
            partitioned = True
        elif number in values and kind == (FIXED32 if number == 6 else VARINT):
            values[number] = value
    dtype = DTYPES.get(values[1])
    entry = Entry(dtype, shape, values[3], values[4], values[5], values[6], partitioned)
    if entry.shard >= shards:
        raise ValueError(f"{name} is in data file {entry.shard} of {shards}")
    if dtype is not None and not partitioned and math.prod(shape) * dtype.itemsize != entry.size:
        raise ValueError(f"{name} of shape {shape} has {entry.size} bytes")
    return entry


def _read_shape(data: bytes) -> Iterator[int]:
    for number, kind, value in read_fields(data):
        if number == 2 and kind == BYTES:
            sizes = [v for n, k, v in read_fields(value) if n == 1 and k == VARINT]
            size = sizes[-1] if sizes else 0
            if size >= 1 << 40:
                raise ValueError("a shape has a dimension of unknown or absurd size")
            yield size
