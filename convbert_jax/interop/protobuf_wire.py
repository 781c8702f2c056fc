"""Protocol buffer messages, field by field, without their schemas (the wire format only)."""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """(field number, wire type, value) of a message; bytes of a BYTES field are not read further.

    Raises:
      ValueError: it is no message.
    """
    at = 0
    while at < len(data):
        tag, at = read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
        else:
            if kind == BYTES:
                size, at = read_varint(data, at)
            elif kind in (FIXED64, FIXED32):
                size = 8 if kind == FIXED64 else 4
            else:
                raise ValueError(f"wire type {kind}")
            if at + size > len(data):
                raise ValueError("a field is cut off")
            value = data[at : at + size]
            if kind != BYTES:
                value = int.from_bytes(value, "little")
            at += size
        yield number, kind, value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """(number, where it ends), at most 64 bits.

    Raises:
      ValueError: it is cut off or too long.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("a number is cut off")
        octet = data[at]
        at += 1
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value & (1 << 64) - 1, at
    raise ValueError("a number has more than 64 bits")


def varint(value: int) -> bytes:
    """`value`, 0 or more, as read_varint reads it."""
    octets = bytearray()
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)


def field(number: int, value: int | bytes, *, fixed32: bool = False) -> bytes:
    """One field of a message."""
    if isinstance(value, bytes):
        return varint(number << 3 | BYTES) + varint(len(value)) + value
    if fixed32:
        return varint(number << 3 | FIXED32) + value.to_bytes(4, "little")
    return varint(number << 3 | VARINT) + varint(value)
