"""LevelDB table files (`.sst`, TensorFlow's `.index`): blocks of sorted keys with values.

Format: google/leveldb, doc/table_format.md. Lengths in a file are untrusted: the reader allocates
no more than a fixed multiple of the file size.
"""

from collections.abc import Callable, Iterable, Iterator

import google_crc32c

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
