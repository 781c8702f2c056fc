"""Reader and writer of TensorFlow V2 checkpoint files, PREFIX.index and PREFIX.data-*.

Format: tensorflow/core/util/tensor_bundle/tensor_bundle.h. The index is a LevelDB table (blocks of
sorted keys with values; google/leveldb, doc/table_format.md) of variable name -> BundleEntryProto;
the key "" has the BundleHeaderProto.

Lengths in a file are untrusted: the reader allocates no more than a fixed multiple of its size.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import check_memory

# Values of tensorflow.DataType. Variables of other types are listed but cannot be read.
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
_LARGEST_INDEX = 1 << 22  # bytes; 100 variables take some 5,000
_MOST_VARIABLES = 1 << 16
_MOST_SHARDS = 1 << 16
_MOST_DIMENSIONS = 32

# tensorflow/core/protobuf/tensor_bundle.proto, reduced to the fields that are read. Signed integers
# are declared unsigned, so that negative values are too large and fail the range checks.
_SCHEMA = """
syntax: "proto3"
name: "tensor_bundle.proto"
message_type {
  name: "Header"
  field { name: "num_shards" number: 1 type: TYPE_UINT64 }
  field { name: "endianness" number: 2 type: TYPE_UINT64 }
  field { name: "version" number: 3 type: TYPE_MESSAGE type_name: "Version" }
}
message_type {
  name: "Version"
  field { name: "producer" number: 1 type: TYPE_INT32 }
  field { name: "min_consumer" number: 2 type: TYPE_INT32 }
}
message_type {
  name: "Entry"
  field { name: "dtype" number: 1 type: TYPE_UINT64 }
  field { name: "shape" number: 2 type: TYPE_MESSAGE type_name: "Shape" }
  field { name: "shard" number: 3 type: TYPE_UINT64 }
  field { name: "offset" number: 4 type: TYPE_UINT64 }
  field { name: "size" number: 5 type: TYPE_UINT64 }
  field { name: "checksum" number: 6 type: TYPE_FIXED32 }
  field { name: "slices" number: 7 type: TYPE_BYTES label: LABEL_REPEATED }
}
message_type {
  name: "Shape"
  field { name: "dim" number: 2 type: TYPE_MESSAGE type_name: "Dimension" label: LABEL_REPEATED }
}
message_type {
  name: "Dimension"
  field { name: "size" number: 1 type: TYPE_UINT64 }
}
"""


def _messages(names: str):
    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return (message_factory.GetMessageClass(pool.FindMessageTypeByName(n)) for n in names.split())


HeaderProto, EntryProto = _messages("Header Entry")


@dataclasses.dataclass(frozen=True)
class Entry:
    """Location and type of a variable; `dtype` is None for unsupported types such as strings."""

    dtype: np.dtype | None
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    checksum: int
    partitioned: bool


class Bundle:
    """A checkpoint whose variables are read on demand."""

    def __init__(self, prefix: Path):
        """Reads the index.

        Args:
          prefix: path without suffix, as model.ckpt-1000000.

        Raises:
          ConversionError: the index is missing, damaged, of another version, or does not match the
            data files.
        """
        self.prefix = prefix
        path = prefix.with_name(prefix.name + ".index")
        try:
            if path.stat().st_size > _LARGEST_INDEX:
                raise ConversionError(
                    f"{path} is too large for a TensorFlow checkpoint index.", path=path
                )
            content = path.read_bytes()
        except OSError as error:
            raise ConversionError(
                f"Cannot read {path}: {error.strerror}. A TensorFlow checkpoint needs its index "
                "file.",
                path=path,
            ) from error
        try:
            self._shards, self._entries = _read_index(content)
        except (ValueError, DecodeError) as error:
            raise ConversionError(
                f"{path} is damaged: {error}. Copy the checkpoint again.", path=path
            ) from error
        self._check_files()

    def names(self) -> list[str]:
        """Returns the names of all variables, in order."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Returns location and type of a variable."""
        return self._entries[name]

    def read(self, name: str) -> np.ndarray:
        """Reads a variable and verifies its checksum.

        Raises:
          ConversionError: the variable is damaged, partitioned, or of an unsupported type.
        """
        entry = self._entries[name]
        if entry.partitioned:
            raise ConversionError(
                f"Variable {name} is partitioned into several tensors. Save the checkpoint again "
                "without a partitioner.",
                field=name,
            )
        if entry.dtype is None:
            raise ConversionError(f"Variable {name} is not of a supported type.", field=name)
        path = self._data_file(entry.shard)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                data = file.read(entry.size)
        except OSError as error:
            raise ConversionError(f"Cannot read {path}: {error.strerror}.", path=path) from error
        if len(data) != entry.size or checksum(data) != entry.checksum:
            raise ConversionError(
                f"Variable {name} in {path} is damaged (wrong checksum). Copy the file again.",
                field=name,
                path=path,
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
                    f"Cannot read {path}: {error.strerror}. Copy all of the {self._shards} data "
                    "file(s) of the checkpoint.",
                    path=path,
                ) from error
        for name, entry in self._entries.items():
            if entry.offset + entry.size > sizes[entry.shard]:
                raise ConversionError(
                    f"{self._data_file(entry.shard)} is truncated before the end of variable "
                    f"{name}. Copy it again.",
                    field=name,
                    path=self._data_file(entry.shard),
                )
        total = sum(entry.size for entry in self._entries.values())
        if total > sum(sizes.values()):
            raise ConversionError(
                f"{self.prefix}.index is damaged: variables overlap. Copy the checkpoint again.",
                path=f"{self.prefix}.index",
            )
        check_memory(total, self.prefix)


def write_bundle(prefix: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a checkpoint with one data file, in the format that TensorFlow reads."""
    numbers = {dtype: number for number, dtype in DTYPES.items()}
    header = HeaderProto(num_shards=1, version={"producer": 1})
    entries, offset = [(b"", header.SerializeToString())], 0
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with prefix.with_name(prefix.name + ".data-00000-of-00001").open("wb") as file:
        for name in sorted(tensors, key=str.encode):
            data = np.asarray(tensors[name]).tobytes()
            entry = EntryProto(
                dtype=numbers[tensors[name].dtype],
                shape={"dim": [{"size": size} for size in np.shape(tensors[name])]},
                offset=offset,
                size=len(data),
                checksum=checksum(data),
            )
            entries.append((name.encode(), entry.SerializeToString()))
            file.write(data)
            offset += len(data)
    prefix.with_name(prefix.name + ".index").write_bytes(write_table(entries))


def _read_index(content: bytes) -> tuple[int, dict[str, Entry]]:
    table = read_table(content)
    first = next(table, None)
    if first is None or first[0] != b"":
        raise ValueError("it lacks a header")
    shards = _read_header(first[1])
    entries = {}
    for key, value in table:
        try:
            name = key.decode()
        except UnicodeDecodeError:
            continue  # a slice of a partitioned variable, which has an entry of its name too
        if len(entries) == _MOST_VARIABLES:
            raise ValueError(f"it has more than {_MOST_VARIABLES} variables")
        entries[name] = _read_entry(value, name, shards)
    return shards, entries


def _read_header(data: bytes) -> int:
    header = HeaderProto.FromString(data)
    if header.endianness:
        raise ValueError("it was written on a big-endian machine")
    if header.version.min_consumer > 1:
        least = header.version.min_consumer
        raise ValueError(f"it needs a reader of version {least}, but this reader has version 1")
    if data and not header.num_shards:
        raise ValueError("its header is not a V2 checkpoint header")
    if not 0 < header.num_shards <= _MOST_SHARDS:
        raise ValueError(f"it claims {header.num_shards} data files")
    return header.num_shards


def _read_entry(data: bytes, name: str, shards: int) -> Entry:
    read = EntryProto.FromString(data)
    dtype, partitioned = DTYPES.get(read.dtype), bool(read.slices)
    if len(read.shape.dim) > _MOST_DIMENSIONS:
        raise ValueError(f"{name} has {len(read.shape.dim)} dimensions")
    shape = tuple(dimension.size for dimension in read.shape.dim)
    if read.shard >= shards:
        raise ValueError(f"{name} is in data file {read.shard} of {shards}")
    if dtype is not None and not partitioned and math.prod(shape) * dtype.itemsize != read.size:
        raise ValueError(f"the size of {name} of shape {shape} is {read.size} bytes")
    return Entry(dtype, shape, read.shard, read.offset, read.size, read.checksum, partitioned)


MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5  # bytes of compression type and checksum after each block
_PLAIN, _SNAPPY = 0, 1
_LONGEST_KEY = 1 << 12
# Bytes of decompressed blocks and of keys (which share prefixes) per byte of the file.
_EXPANSION = 32
_BLOCK = 1 << 12  # target bytes of a block that is written


def checksum(data: bytes) -> int:
    """Returns the masked CRC-32C; masking keeps checksums of data that contains CRCs useful."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_table(data: bytes) -> bool:
    """Returns whether the content of a file ends with the magic number of a table."""
    return len(data) >= _FOOTER and int.from_bytes(data[-8:], "little") == MAGIC


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields (key, value) in order.

    Args:
      data: the content of the file.

    Raises:
      ValueError: the file is damaged or not a table; the message has the reason.
    """
    if not is_table(data):
        raise ValueError("the footer of a table is missing (truncated, or another format)")
    left = _EXPANSION * len(data)

    def spend(size: int) -> None:
        nonlocal left
        left -= size
        if left < 0:
            raise ValueError("its content is larger than the size of the file allows")

    _, at = _read_handle(data[-_FOOTER:], 0)  # skip the handle of the index of meta blocks
    index, _ = _read_handle(data[-_FOOTER:], at)
    previous, covered = None, 0
    for _, handle in _read_entries(_read_block(data, *index, spend), spend):
        (offset, size), _ = _read_handle(handle, 0)
        covered += size + _TRAILER
        if covered > len(data):
            raise ValueError("its blocks overlap")
        for key, value in _read_entries(_read_block(data, offset, size, spend), spend):
            if previous is not None and key <= previous:
                raise ValueError("its keys are not in order")
            previous = key
            yield key, value


def write_table(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the content of an uncompressed table; entries must be sorted by key."""
    file, index, block, last = bytearray(), [], [], b""

    def close_block():
        index.append((last, _append_block(file, block)))
        block.clear()

    for key, value in entries:
        block.append((key, value))
        last = key
        if sum(len(k) + len(v) for k, v in block) > _BLOCK:
            close_block()
    if block:
        close_block()
    meta = _append_block(file, [])
    footer = meta + _append_block(file, index)
    footer += bytes(_FOOTER - 8 - len(footer))
    return bytes(file) + footer + MAGIC.to_bytes(8, "little")


def _append_block(file: bytearray, entries: list[tuple[bytes, bytes]]) -> bytes:
    """Appends a block without shared key prefixes and returns its handle."""
    content, restarts = bytearray(), []
    for key, value in entries:
        restarts.append(len(content))
        content += varint(0) + varint(len(key)) + varint(len(value)) + key + value
    for restart in restarts or [0]:
        content += restart.to_bytes(4, "little")
    content += len(restarts or [0]).to_bytes(4, "little")
    handle = varint(len(file)) + varint(len(content))
    content.append(_PLAIN)
    file += content + checksum(bytes(content)).to_bytes(4, "little")
    return handle


def _read_handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _read_block(data: bytes, offset: int, size: int, spend: Callable[[int], None]) -> bytes:
    end = offset + size
    if end + _TRAILER > len(data) - _FOOTER:
        raise ValueError("a block lies outside of the file")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if checksum(data[offset : end + 1]) != stored:
        raise ValueError("the checksum of a block is wrong")
    if data[end] == _SNAPPY:
        return _expand(data[offset:end], spend)
    if data[end] != _PLAIN:
        raise ValueError(f"a block has the unknown compression type {data[end]}")
    return data[offset:end]


def _read_entries(block: bytes, spend: Callable[[int], None]) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block is truncated")
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if end < 0:
        raise ValueError("a block is truncated")
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at)
        unshared, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + unshared + length > end or shared + unshared > _LONGEST_KEY:
            raise ValueError("an entry is truncated")
        spend(shared + unshared)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length


def _expand(data: bytes, spend: Callable[[int], None]) -> bytes:
    import pyarrow

    size, _ = read_varint(data, 0)
    spend(size)
    try:
        return pyarrow.decompress(data, decompressed_size=size, codec="snappy", asbytes=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"a block cannot be decompressed ({error})") from None


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads a varint of at most 64 bits.

    Returns:
      (number, offset of the next byte).

    Raises:
      ValueError: the number is truncated or too long.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is truncated")
        octet = data[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("a number has more than 64 bits")


def varint(value: int) -> bytes:
    """Encodes a nonnegative integer for `read_varint`."""
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
