"""CRC-32C (Castagnoli, RFC 3720), which TensorFlow and LevelDB keep of every block and tensor.

No library that this project stands on has it. A checkpoint has gigabytes, so numpy works on many
stretches of the data at once and joins their sums: a CRC is linear over the bits.
"""

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # reflected
_LANES = 1 << 14
_SHORT = 1 << 17  # bytes; below, one after the other is quicker


def crc32c(data: bytes | bytearray | memoryview | np.ndarray) -> int:
    """CRC-32C of `data`."""
    octets = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    octets = octets.reshape(-1).view(np.uint8)
    state, start = 0xFFFFFFFF, 0
    while len(octets) - start >= _SHORT:
        width = min((len(octets) - start) // _LANES, 1 << 12) // 2 * 2
        block = octets[start : start + width * _LANES].reshape(_LANES, width)
        state = _shift(state, width * _LANES) ^ _join(_run_lanes(block), width)
        start += width * _LANES
    table = _byte_table()
    for octet in octets[start:].tolist():
        state = table[(state ^ octet) & 0xFF] ^ (state >> 8)
    return state ^ 0xFFFFFFFF


def mask(crc: int) -> int:
    """As stored: a CRC of data that holds its own CRC would be no check."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _run_lanes(block: np.ndarray) -> np.ndarray:
    """States after each row of `block`, each begun at 0; two bytes a step."""
    table = _word_table()
    words = np.ascontiguousarray(block).view("<u2").T  # [steps, lanes]
    state = np.zeros(block.shape[0], np.uint32)
    for word in np.ascontiguousarray(words):
        state = table[(state & 0xFFFF) ^ word] ^ (state >> 16)
    return state


def _join(states: np.ndarray, width: int) -> int:
    """State after all rows, from the states of each: pairs, pairs of pairs, ..."""
    states, length = states.astype(np.uint32), width
    while len(states) > 1:
        columns = _shift_columns(length)
        moved = np.zeros(len(states) // 2, np.uint32)
        for bit, column in enumerate(columns):
            moved ^= np.where(states[::2] >> np.uint32(bit) & 1, np.uint32(column), np.uint32(0))
        states, length = moved ^ states[1::2], 2 * length
    return int(states[0])


def _shift(state: int, length: int) -> int:
    """State after `length` zero bytes."""
    return _apply(_shift_columns(length), state)


@functools.cache
def _shift_columns(length: int) -> tuple[int, ...]:
    """Where each bit of a state goes in `length` zero bytes, by squaring."""
    if length == 1:
        table = _byte_table()
        return tuple(table[(1 << bit) & 0xFF] ^ ((1 << bit) >> 8) for bit in range(32))
    half = _shift_columns(length // 2)
    columns = tuple(_apply(half, column) for column in half)
    if length % 2:
        columns = tuple(_apply(_shift_columns(1), column) for column in columns)
    return columns


def _apply(columns: tuple[int, ...], state: int) -> int:
    result, bit = 0, 0
    while state:
        if state & 1:
            result ^= columns[bit]
        state, bit = state >> 1, bit + 1
    return result


@functools.cache
def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


@functools.cache
def _word_table() -> np.ndarray:
    """The same for two bytes at once."""
    single = np.array(_byte_table(), np.uint32)
    words = np.arange(1 << 16, dtype=np.uint32)
    state = single[words & 0xFF] ^ (words >> 8)
    return single[state & 0xFF] ^ (state >> 8)
