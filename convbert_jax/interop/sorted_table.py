"""LevelDB's table file (`.sst`, TensorFlow's `.index`): sorted keys with values, in blocks.

Format: google/leveldb, doc/table_format.md. Every length in a file is a claim: nothing is read or
made that is larger than the file can account for.
"""

from collections.abc import Iterable, Iterator

from convbert_jax.interop.crc32c import crc32c, mask
from convbert_jax.interop.protobuf_wire import read_varint, varint

MAGIC = 0xDB4775248B80FB57
_FOOTER = 48
_TRAILER = 5  # compression type and checksum behind each block
_PLAIN, _SNAPPY = 0, 1
_LONGEST_KEY = 1 << 16
_SNAPPY_RATIO = 32  # three bytes make at most 64
_EXPANSION = 64  # bytes of keys for a byte of file: keys of a block share their beginnings
_BLOCK = 1 << 12  # bytes that this writer puts into a block


def is_table(data: bytes) -> bool:
    """Whether a file of this content claims to be a table."""
    return len(data) >= _FOOTER and int.from_bytes(data[-8:], "little") == MAGIC


def read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(key, value), in order.

    Args:
      data: the whole file.

    Raises:
      ValueError: it is not a table, or it is damaged; says what.
    """
    if not is_table(data):
        raise ValueError("its end is not that of a table, it is cut off or something else")
    _, at = _read_handle(data[-_FOOTER:], 0)  # of the index of meta blocks
    index, _ = _read_handle(data[-_FOOTER:], at)
    budget = _EXPANSION * len(data) + _LONGEST_KEY
    previous, covered = None, 0
    for _, handle in _read_entries(_read_block(data, *index)):
        place, _ = _read_handle(handle, 0)
        covered += place[1]
        if covered > len(data):
            raise ValueError("its blocks overlap")
        for key, value in _read_entries(_read_block(data, *place)):
            budget -= len(key)
            if budget < 0:
                raise ValueError("its keys are larger than it can hold")
            if previous is not None and key <= previous:
                raise ValueError("its keys are not in order")
            previous = key
            yield key, value


def write_table(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The file with these entries, which must be in order of their keys; nothing compressed."""
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
    """Appends a block without shared beginnings and returns its handle."""
    content, restarts = bytearray(), []
    for key, value in entries:
        restarts.append(len(content))
        content += varint(0) + varint(len(key)) + varint(len(value)) + key + value
    for restart in restarts or [0]:
        content += restart.to_bytes(4, "little")
    content += len(restarts or [0]).to_bytes(4, "little")
    handle = varint(len(file)) + varint(len(content))
    content.append(_PLAIN)
    file += content + mask(crc32c(bytes(content))).to_bytes(4, "little")
    return handle


def _read_handle(data: bytes, at: int) -> tuple[tuple[int, int], int]:
    offset, at = read_varint(data, at)
    size, at = read_varint(data, at)
    return (offset, size), at


def _read_block(data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _TRAILER > len(data) - _FOOTER:
        raise ValueError("a block lies outside of it")
    stored = int.from_bytes(data[end + 1 : end + _TRAILER], "little")
    if mask(crc32c(data[offset : end + 1])) != stored:
        raise ValueError("the checksum of a block is wrong")
    if data[end] == _SNAPPY:
        return _expand(data[offset:end])
    if data[end] != _PLAIN:
        raise ValueError(f"a block is compressed in an unknown way ({data[end]})")
    return data[offset:end]


def _read_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(block) < 4:
        raise ValueError("a block is cut off")
    end = len(block) - 4 - 4 * int.from_bytes(block[-4:], "little")
    if end < 0:
        raise ValueError("a block is cut off")
    at, key = 0, b""
    while at < end:
        shared, at = read_varint(block, at)
        unshared, at = read_varint(block, at)
        length, at = read_varint(block, at)
        if shared > len(key) or at + unshared + length > end or shared + unshared > _LONGEST_KEY:
            raise ValueError("an entry is cut off")
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length


def _expand(data: bytes) -> bytes:
    """Snappy (google/snappy, format_description.txt)."""
    size, at = read_varint(data, 0)
    if size > _SNAPPY_RATIO * len(data):
        raise ValueError("a compressed block claims to be larger than it can be")
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[at : at + extra], "little")
                at += extra
            length += 1
            if at + length > len(data):
                raise ValueError("a compressed block is cut off")
            out += data[at : at + length]
            at += length
        else:
            extra = (1, 2, 4)[(tag & 3) - 1]
            if at + extra > len(data):
                raise ValueError("a compressed block is cut off")
            distance = int.from_bytes(data[at : at + extra], "little")
            if extra == 1:
                length, distance = (tag >> 2 & 7) + 4, distance | (tag >> 5) << 8
            else:
                length = (tag >> 2) + 1
            at += extra
            if not 0 < distance <= len(out):
                raise ValueError("a compressed block refers outside of itself")
            piece = bytes(out[len(out) - distance :])  # repeats itself where it is too short
            out += (piece * (length // distance + 1))[:length]
        if len(out) > size:
            raise ValueError("a compressed block is larger than it says")
    if len(out) != size:
        raise ValueError("a compressed block is smaller than it says")
    return bytes(out)
