"""Damaged or hostile folders and checkpoints are read correctly or refused.

Errors have one line, and reading is limited in time and memory.
"""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax.config import UserError
from convbert_jax.interop import huggingface, sources, tensor_bundle, tensorflow1
from convbert_jax.interop.tensor_bundle import EntryProto, HeaderProto, checksum, varint
from tests.interop.conftest import assert_same, edit_config, limits, random_network, random_parts

DEEP = "[" * 200_000
WEIGHT = "embeddings.word_embeddings.weight"
VARIABLE = "electra/embeddings/word_embeddings"
INDEX, DATA = "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"
MARK = "exported_by_convbert_jax.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder and its networks."""
    place = tmp_path_factory.mktemp("sound") / "folder"
    network = random_network(generator={"kind": "uniform"}, mask_convolution=False)
    huggingface.write_network(place, network, pad_id=0)
    return place, sources.read_source(str(place)).networks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A TensorFlow checkpoint and its networks."""
    place = tmp_path_factory.mktemp("sound") / "checkpoint"
    _, networks = random_parts(mask_convolution=False)
    tensorflow1.write_checkpoint(place / "model.ckpt-7", networks, step=7, moments=(networks,) * 2)
    return place, sources.read_source(str(place)).networks


def is_read(place, sound) -> bool:
    """Return True if `place` is read correctly, False if it is refused in one line."""
    with limits():
        try:
            found, refusal = sources.read_source(str(place)), ""
        except UserError as error:
            refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        assert len(refusal.encode()) < 1_000
        return False
    for name, network in found.networks.items():
        assert_same(network, sound[name])
    return True


def write(name: str, content):
    """Return a change of a folder: replace a file's content, or create it with `content(path)`."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        if callable(content):
            content(folder / name)
        else:
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)

    return change


# --- Hugging Face ---

SIZES = (
    "vocab_size", "hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "max_position_embeddings", "type_vocab_size", "conv_kernel_size",
    "num_groups", "head_ratio",
)  # fmt: skip
WRONG = (0, -1, 1.5, True, None, "7", [], {}, 1 << 20, 10**30, 1e308, float("nan"))
FIELDS = (
    *("architectures", "model_type", "hidden_act", "hidden_dropout_prob", "layer_norm_eps"),
    *("pad_token_id", "id2label", "convbert_jax", *SIZES),
)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES |= st.lists(st.integers(), max_size=2) | st.sampled_from([0, 1, 2, 3, 64, 1 << 20])


def test_a_wrong_size_is_refused(folder, tmp_path):
    """Every size field with every wrong value."""
    place, sound = folder
    copy = Path(shutil.copytree(place, tmp_path / "it"))
    original = (copy / "config.json").read_text()
    for field in SIZES:
        for value in WRONG:
            edit_config(copy, **{field: value})
            assert not is_read(copy, sound), (field, value)
            (copy / "config.json").write_text(original)


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=4))
@settings(max_examples=80)
def test_any_config_is_read_or_refused(folder, fields):
    place, _ = folder
    original = (place / "config.json").read_text()
    try:
        edit_config(place, **fields)
        huggingface.read_folder(place)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        (place / "config.json").write_text(original)


def fields(**values):
    return lambda folder: edit_config(folder, **values)


def safetensors(header, data=b"", size=None):
    def change(folder: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        head = struct.pack("<Q", len(text) if size is None else size)
        (folder / "model.safetensors").write_bytes(head + text + data)

    return change


def tensor(dtype="F32", shape=(1,), offsets=(0, 4)):
    return safetensors({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, bytes(4))


def retyped(kind: str):
    """Change all dtypes: to the same width, or to one byte with four times the elements."""

    def change(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        for name, entry in header.items():
            if name != "__metadata__":
                entry["dtype"] = kind
                entry["shape"] += [4] if "8" in kind else []
        safetensors(header, data[size:])(folder)

    return change


def shards(table):
    """Store the weights in both a.safetensors and b.safetensors."""

    def change(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder / "b.safetensors")
        os.rename(folder / "model.safetensors", folder / "a.safetensors")
        text = table if isinstance(table, str) else json.dumps({"weight_map": table})
        (folder / "model.safetensors.index.json").write_text(text)

    return change


def vocabulary(name: str, content: str):
    def change(folder: Path) -> None:
        (folder / "vocab.txt").write_text("[PAD]\n")
        (folder / name).write_text(content)

    return change


def generator(make=lambda folder: None):
    def change(folder: Path) -> None:
        (folder / "generator").mkdir()
        make(folder / "generator")

    return change


def many_tensors(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    safetensors({f"t{i}": entry for i in range(200_000)})(folder)


HUGGING_FACE = {
    "all sizes 2**20": fields(**dict.fromkeys(SIZES, 1 << 20)),
    "all sizes 2**20, one head": fields(
        **dict.fromkeys(SIZES, 1 << 20) | {"num_attention_heads": 2, "head_ratio": 2}
    ),
    "model_type of a list": fields(model_type=[]),
    "step of words": fields(convbert_jax={"step": "many"}),
    "step of 10**30": fields(convbert_jax={"step": 10**30}),
    "config, not UTF-8": write("config.json", b"\xff\xfe{"),
    "config that nests": write("config.json", DEEP),
    "config of 40 MB": lambda folder: write("config.json", "[" + "[]," * 13_000_000 + "[]]")(
        folder
    ),
    "config is a pipe": write("config.json", os.mkfifo),
    "config is a folder": write("config.json", Path.mkdir),
    "header of 2**63": safetensors(b"{}", size=1 << 63),
    "header that nests": safetensors(DEEP.encode()),
    "tensors, 200,000": many_tensors,
    "tensor of 2**80 numbers": tensor(shape=(1 << 40, 1 << 40)),
    "tensor of 2**62 nothings": tensor(shape=(1 << 62, 0), offsets=(0, 0)),
    "tensor outside": tensor(offsets=(1 << 40, (1 << 40) + 4)),
    "tensor of an unknown type": tensor("F3"),
    "a file of holes": lambda folder: os.truncate(folder / "model.safetensors", 1 << 40),
    "weights as integers": retyped("I32"),
    "weights as unsigned": retyped("U32"),
    "weights of eight bits": retyped("F8_E4M3"),
    "weights are a pipe": write("model.safetensors", os.mkfifo),
    **{
        f"weights of {size} bytes": lambda f, size=size: os.truncate(f / "model.safetensors", size)
        for size in (0, 5, 9, 999)
    },
    "shard of 5,000 letters": shards({WEIGHT: "a" * 5_000}),
    "shard above": shards({WEIGHT: "../a.safetensors"}),
    "shard without a name": shards({WEIGHT: ""}),
    "shard ..": shards({WEIGHT: ".."}),
    "shard with a zero": shards({WEIGHT: "a\0b"}),
    "shard null": shards({WEIGHT: None}),
    "shards, a list": shards(["a.safetensors"]),
    "shards that nest": shards(DEEP),
    "shards without all": shards({"one more": "a.safetensors"}),
    "shards with the same": shards({"one": "a.safetensors", "two": "b.safetensors"}),
    "generator without config": generator(),
    "generator that nests": generator(lambda folder: (folder / "config.json").write_text(DEEP)),
    "generator without weights": generator(
        lambda folder: (folder / "config.json").write_text('{"model_type": "convbert"}')
    ),
    "mark that nests": write(MARK, DEEP),
    "mark of another": write(MARK, '{"crc32c": {"model.safetensors": 7}}'),
    "mark without sums": write(MARK, '{"crc32c": []}'),
    "vocabulary settings that nest": vocabulary("tokenizer_config.json", DEEP),
    "vocabulary settings of words": vocabulary(
        "tokenizer_config.json", '{"do_lower_case": "maybe"}'
    ),
    "vocabulary of words without end": vocabulary(
        "tokenizer.json", '{"model": {"max_input_chars_per_word": 1e9}}'
    ),
}
# Fields that have no effect or a default accept anything.
HARMLESS = {
    "architectures of numbers": fields(architectures=[7]),
    "labels by the million": lambda folder: fields(id2label={str(i): "x" for i in range(300_000)})(
        folder
    ),
    "use of a list": fields(convbert_jax={"use": []}),
    "problem of a list": fields(problem_type=[]),
    "vocabulary of lists": write("tokenizer.json", '{"model": [], "normalizer": []}'),
}


@pytest.mark.parametrize("name", [*HUGGING_FACE, *HARMLESS])
def test_a_folder_is_read_or_refused(folder, tmp_path, name):
    place, sound = folder
    shutil.copytree(place, tmp_path / "it")
    (HUGGING_FACE | HARMLESS)[name](tmp_path / "it")
    assert is_read(tmp_path / "it", sound) == (name in HARMLESS)


# --- TensorFlow ---

RESTART = bytes(4) + (1).to_bytes(4, "little")


def table_of(block: bytes, *, kind=0, index: bytes | None = None, index_kind=0) -> bytes:
    """Return a table of one data block with valid checksums; `index` replaces its index."""

    def sealed(content: bytes, kind: int) -> bytes:
        stored = content + bytes([kind])
        return stored + checksum(stored).to_bytes(4, "little")

    data, meta = sealed(block, kind), sealed(RESTART, 0)
    handle = varint(0) + varint(len(block))
    if index is None:
        index = entry_of(0, b"z", handle) + RESTART
    footer = varint(len(data)) + varint(len(RESTART))
    footer += varint(len(data) + len(meta)) + varint(len(index))
    footer += bytes(40 - len(footer)) + tensor_bundle.MAGIC.to_bytes(8, "little")
    return data + meta + sealed(index, index_kind) + footer


def entry_of(shared: int, key: bytes, value: bytes) -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


def index(make):
    """Replace the index with the result of `make`."""
    return lambda folder: write(INDEX, make())(folder)


def rows(change):
    """Change entries of the index."""

    def make(folder: Path) -> None:
        found = dict(tensor_bundle.read_table((folder / INDEX).read_bytes()))
        change(found)
        (folder / INDEX).write_bytes(tensor_bundle.write_table(sorted(found.items())))

    return make


def entry(name=VARIABLE, size_of_data=0, **claims):
    """Change fields of one variable's entry; extend the data file to `size_of_data` (sparse)."""

    def make(folder: Path) -> None:
        def change(found):
            proto = EntryProto.FromString(found[name.encode()])
            for field, value in claims.items():
                if field == "shape":
                    proto.ClearField("shape")
                    proto.shape.SetInParent()
                    for size in value:
                        proto.shape.dim.add(size=size)
                else:
                    setattr(proto, field, value)
            found[name.encode()] = proto.SerializeToString()

        rows(change)(folder)
        if size_of_data:
            os.truncate(folder / DATA, size_of_data)

    return make


def header(**claims):
    return rows(lambda found: found.update({b"": HeaderProto(**claims).SerializeToString()}))


HEADER = entry_of(0, b"", HeaderProto(num_shards=1).SerializeToString())


def copies() -> bytes:
    """Snappy: one long literal, then 1-byte copies from the start of the output."""
    literal, count = bytes(700_000), 100_000
    packed = bytes([62 << 2]) + (len(literal) - 1).to_bytes(3, "little") + literal
    packed += (bytes([3]) + len(literal).to_bytes(4, "little")) * count
    return varint(len(literal) + count) + packed


def long_keys(first=b"", value=b"") -> bytes:
    """Keys that share 4,000 bytes with the previous key."""
    block = first + entry_of(0, b"k" * 4_000, value)
    others = (entry_of(4_000, i.to_bytes(3, "big"), value) for i in range(300_000))
    return block + b"".join(others) + RESTART


def many_entries() -> bytes:
    others = (entry_of(0, i.to_bytes(3, "big"), b"") for i in range(1, 500_000))
    return HEADER + b"".join(others) + RESTART


def many_blocks() -> bytes:
    handle = varint(0) + varint(len(RESTART))
    return b"".join(entry_of(0, i.to_bytes(3, "big"), handle) for i in range(200_000)) + RESTART


def nested(name: bytes):
    data = b""
    for _ in range(20_000):
        data = bytes([2 << 3 | 2]) + varint(len(data)) + data
    return rows(lambda found: found.update({name: data}))


def many_layers(found) -> None:
    value = next(v for k, v in found.items() if k.endswith(b"/key/kernel"))
    for i in range(40_000):
        found[f"electra/encoder/layer_{i}/attention/self/key/kernel".encode()] = value


TENSORFLOW = {
    "snappy, copies from far": index(lambda: table_of(copies(), kind=1)),
    "snappy, claims 2**40": index(lambda: table_of(varint(1 << 40) + b"\0a", kind=1)),
    "snappy, claims 30 times": index(lambda: table_of(varint(30_000) + bytes(1_000), kind=1)),
    "snappy, index of blocks": index(lambda: table_of(RESTART, index=copies(), index_kind=1)),
    "unknown compression": index(lambda: table_of(RESTART, kind=7)),
    "keys that share their beginnings": index(lambda: table_of(long_keys(HEADER))),
    "keys of blocks that share theirs": index(
        lambda: table_of(RESTART, index=long_keys(value=varint(0) + varint(len(RESTART))))
    ),
    "half a million entries": index(lambda: table_of(many_entries())),
    "a hundred thousand blocks": index(lambda: table_of(RESTART, index=many_blocks())),
    "restarts that do not exist": index(lambda: table_of(bytes(4) + b"\xff" * 4)),
    "an index of 5 MB": index(lambda: table_of(bytes(5_000_000))),
    "a header that nests": lambda folder: nested(b"")(folder),
    "dimensions, 400,000": rows(
        lambda found: found.update(
            {
                VARIABLE.encode(): EntryProto(
                    dtype=1, shape={"dim": [{"size": 1}] * 400_000}, size=4
                ).SerializeToString()
            }
        )
    ),
    "layers, 40,000": rows(many_layers),
    "a layer of number 10**18": rows(
        lambda found: found.update({b"electra/encoder/layer_999999999999999999/x": b""})
    ),
    "no data files": header(num_shards=0),
    "data files, 65,536": header(num_shards=65_536),
    "big-endian": header(num_shards=1, endianness=1),
    "of the future": header(num_shards=1, version={"min_consumer": 9}),
    "a table of 400 GB": entry(shape=(1 << 20, 100_000), size=1 << 20, size_of_data=1 << 40),
    "4 TB that the data file has": entry(
        shape=(1_000_000, 1_000_000), size=4 * 10**12, offset=0, size_of_data=1 << 42
    ),
    "a shape of 2**64 numbers": entry(shape=(1 << 32, 1 << 32), size=0),
    "a shape of -1": entry(shape=((1 << 64) - 1, 2), size=16),
    "a shape of nothing": entry(shape=(), size=4),
    "a shape of zeros": entry(shape=(0, 0), size=0),
    "an offset of 2**63": entry(offset=1 << 63),
    "the second data file": entry(shard=1),
    "float64 weights": entry(dtype=2, size=0, shape=(0, 2)),
    "weights that are integers": entry(dtype=3),
    "weights that are strings": entry(dtype=7),
    "a step of floats": entry("global_step", dtype=2),
    "a step of several numbers": entry("global_step", shape=(1,)),
    "the index is a pipe": write(INDEX, os.mkfifo),
    "the data are a folder": write(DATA, Path.mkdir),
    "the data are a pipe": write(DATA, os.mkfifo),
    "the data are a link to themselves": write(DATA, lambda path: path.symlink_to(path.name)),
    "a mark of words": write(MARK, '{"mask_convolution": "no"}'),
}
TENSORFLOW_HARMLESS = {
    "an entry that nests": lambda folder: nested(b"x")(folder),
    "a state of binary": write("checkpoint", bytes(range(256)) * 1_000),
    "a state of another": write("checkpoint", f'model_checkpoint_path: "{"x/" * 9_999}"\n'),
    "heads that nest": write("bert_config.json", DEEP),
}


@pytest.mark.parametrize("name", [*TENSORFLOW, *TENSORFLOW_HARMLESS])
def test_a_checkpoint_is_read_or_refused(checkpoint, tmp_path, name):
    place, sound = checkpoint
    shutil.copytree(place, tmp_path / "it")
    (TENSORFLOW | TENSORFLOW_HARMLESS)[name](tmp_path / "it")
    assert is_read(tmp_path / "it", sound) == (name in TENSORFLOW_HARMLESS)
