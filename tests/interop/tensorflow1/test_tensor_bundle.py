"""TensorFlow's checkpoint files without TensorFlow: real, written here, and damaged ones."""

import contextlib
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.interop import tensor_bundle, tensorflow1
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.tensor_bundle import (
    Bundle,
    EntryProto,
    HeaderProto,
    checksum,
    read_varint,
    varint,
    write_bundle,
)
from tests.interop.tensorflow1 import tf_values
from tests.interop.test_hostile_files import RESTART, table_of
from tests.refusals import refused

REAL = pathlib.Path(__file__).resolve().parent / "tensorflow"
ARRAYS = {
    "a/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a/kernel/adam_m": np.ones((3, 4), np.float32),
    "empty": np.zeros((0, 4), np.float32),
    "scalar": np.float32(2.5),
    "step": np.int64(7),
    "ü": np.arange(3, dtype=np.int32),
}


def masked(data: bytes) -> int:
    """Compute the masked CRC-32C from its definition, as LevelDB stores it."""
    state = 0xFFFFFFFF
    for octet in data:
        state ^= octet
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
    crc = state ^ 0xFFFFFFFF
    return (crc << 17 & 0xFFFFFFFF | crc >> 15) + 0xA282EAD8 & 0xFFFFFFFF


@given(st.binary(max_size=300))
def test_checksums_by_definition(data):
    assert checksum(data) == masked(data)


@given(st.integers(0, (1 << 64) - 1))
def test_varints(value):
    assert read_varint(varint(value), 0) == (value, len(varint(value)))


@given(st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=3000), max_size=40))
def test_tables_round_trip(entries):
    ordered = sorted(entries.items())
    assert list(tensor_bundle.read_table(tensor_bundle.write_table(ordered))) == ordered


@given(st.binary(max_size=400))
@settings(max_examples=100)
def test_no_bytes_hang_or_crash_a_table(data):
    footer = bytes(40) + tensor_bundle.MAGIC.to_bytes(8, "little")
    for content in (data, data + footer, data + footer[len(data) % 40 :]):
        with contextlib.suppress(ValueError):
            list(tensor_bundle.read_table(content))


def test_blocks_with_shared_beginnings_are_read():
    """LevelDB's prefix compression: the second key reuses three bytes of the first."""
    block = bytes([0, 4, 1]) + b"abcd" + b"1" + bytes([3, 2, 1]) + b"xy" + b"2"
    entries = list(tensor_bundle.read_table(table_of(block + RESTART)))
    assert entries == [(b"abcd", b"1"), (b"abcxy", b"2")]


def test_snappy_blocks_are_read():
    """Two literals, a copy that overlaps itself, and a two-byte copy."""
    plain = bytes([0, 1, 12]) + b"a" + b"abababababab" + RESTART
    packed = varint(len(plain))
    packed += bytes([(6 - 1) << 2]) + plain[:6]  # literal: header, key, "ab"
    packed += bytes([1 | (8 - 4) << 2, 2])  # copy eight bytes from offset 2
    packed += bytes([2 | (2 - 1) << 2, 2, 0])  # copy two bytes from offset 2, long form
    packed += bytes([(8 - 1) << 2]) + RESTART
    assert list(tensor_bundle.read_table(table_of(packed, kind=1))) == [(b"a", b"abababababab")]


@given(st.binary(max_size=120))
@settings(max_examples=100)
def test_no_bytes_hang_or_crash_snappy(data):
    for size in (len(data), 20 * len(data), 1 << 40):
        with contextlib.suppress(ValueError):
            list(tensor_bundle.read_table(table_of(varint(size) + data, kind=1)))


def test_bundles_round_trip(tmp_path):
    prefix = tmp_path / "model.ckpt-7"
    write_bundle(prefix, ARRAYS)
    bundle = Bundle(prefix)
    assert bundle.names() == sorted(ARRAYS, key=str.encode)
    for name, array in ARRAYS.items():
        read = bundle.read(name)
        assert read.dtype == array.dtype
        np.testing.assert_array_equal(read, array)


def test_what_tensorflow_wrote():
    bundle = Bundle(REAL / "convbert" / f"model.ckpt-{tf_values.STEP}")
    shapes = tf_values.variables() | tf_values.slots()
    assert set(bundle.names()) == set(shapes) | {"global_step"}
    for name, shape in shapes.items():
        np.testing.assert_array_equal(bundle.read(name), tf_values.value(name, shape))
    assert bundle.read("global_step") == tf_values.STEP


def test_what_tensorflow_wrote_into_three_files():
    bundle = Bundle(REAL / "sharded" / f"model.ckpt-{tf_values.STEP}")
    for i in range(4):
        name = f"part_{i}/kernel"
        np.testing.assert_array_equal(bundle.read(name), tf_values.value(name, (3, 4)))


def test_what_tensorflow_partitioned():
    bundle = Bundle(REAL / "partitioned" / f"model.ckpt-{tf_values.STEP}")
    with refused(ConversionError, field="electra/embeddings/word_embeddings"):
        bundle.read("electra/embeddings/word_embeddings")


@pytest.fixture
def written(tmp_path):
    prefix = tmp_path / "model.ckpt-7"
    write_bundle(prefix, ARRAYS)
    return prefix, tmp_path / "model.ckpt-7.index", tmp_path / "model.ckpt-7.data-00000-of-00001"


def test_missing_cut_and_damaged_files_are_refused(written):
    prefix, index, data = written
    content = data.read_bytes()
    data.unlink()
    with refused(ConversionError, path=data):
        Bundle(prefix)
    data.write_bytes(content[:-1])
    with refused(ConversionError, field="ü", path=data):
        Bundle(prefix)
    data.write_bytes(content[:5] + bytes([content[5] ^ 1]) + content[6:])
    with refused(ConversionError, field="a/kernel", path=data):
        Bundle(prefix).read("a/kernel")
    index.unlink()
    with refused(ConversionError, path=index):
        Bundle(prefix)


def test_every_flipped_byte_and_every_length_of_the_index(written):
    """All damage is detected and raises ConversionError."""
    prefix, index, _ = written
    content = index.read_bytes()
    damaged = [content[:size] for size in range(len(content))]
    for at in range(len(content)):
        damaged.append(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
    unnoticed = 0
    for wrong in damaged:
        index.write_bytes(wrong)
        try:
            bundle = Bundle(prefix)
            assert bundle.names() == sorted(ARRAYS, key=str.encode)
            unnoticed += 1
        except ConversionError:
            pass
    assert unnoticed <= 60  # unread: the footer's padding and the empty metaindex block


NUMBERS = st.integers(0, 3) | st.integers(0, (1 << 64) - 1)
entries = st.dictionaries(
    st.text(max_size=5), st.binary(max_size=40) | st.builds(
        lambda kind, sizes, shard, offset, size: EntryProto(
            dtype=kind, shape={"dim": [{"size": s} for s in sizes]}, shard=shard, offset=offset,
            size=size,
        ).SerializeToString(),
        st.integers(0, 30), st.lists(NUMBERS, max_size=40), NUMBERS, NUMBERS, NUMBERS,
    ), max_size=5,
)  # fmt: skip


@given(entries, st.binary(max_size=12) | st.just(HeaderProto(num_shards=1).SerializeToString()))
@settings(max_examples=60)
def test_no_index_hangs_or_crashes(tmp_path_factory, table, header):
    """Valid checksums, invalid contents: sizes that overflow, missing shards."""
    folder = tmp_path_factory.mktemp("fuzz", numbered=True)
    prefix = folder / "model.ckpt"
    rows = {b"": header} | {key.encode(): value for key, value in table.items()}
    prefix.with_name("model.ckpt.index").write_bytes(
        tensor_bundle.write_table(sorted(rows.items()))
    )
    prefix.with_name("model.ckpt.data-00000-of-00001").write_bytes(bytes(64))
    try:
        bundle = Bundle(prefix)
        for name in bundle.names():
            bundle.read(name)
    except ConversionError:
        pass


def test_real_index_files_with_random_damage(tmp_path):
    """TensorFlow's file with checksums fixed after the damage, so that the parser is reached."""
    content = (REAL / "convbert" / f"model.ckpt-{tf_values.STEP}.index").read_bytes()
    rng = np.random.default_rng(0)
    rows = list(tensor_bundle.read_table(content))
    for number in range(25):
        rows_now = [list(row) for row in rows]
        row = rows_now[rng.integers(len(rows_now))]
        at = rng.integers(2)
        data = bytearray(row[at])
        if data:
            data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        row[at] = bytes(data)
        prefix = tmp_path / f"{number}"
        ordered = sorted({bytes(k): bytes(v) for k, v in rows_now}.items())
        prefix.with_name(f"{number}.index").write_bytes(tensor_bundle.write_table(ordered))
        prefix.with_name(f"{number}.data-00000-of-00001").write_bytes(
            (REAL / "convbert" / f"model.ckpt-{tf_values.STEP}.data-00000-of-00001").read_bytes()
        )
        with contextlib.suppress(ConversionError):
            tensorflow1.read_checkpoint(prefix)
