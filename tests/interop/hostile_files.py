"""Folders and checkpoints made to hang, to fill the memory or to be read wrongly, by name.

Each is a function of a folder that holds something sound (`model.safetensors` and `config.json` of
a network, or `model.ckpt-7.*`) and makes it hostile.
"""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from convbert_jax.interop.tensorflow1 import sorted_table
from convbert_jax.interop.tensorflow1.sorted_table import checksum, varint
from convbert_jax.interop.tensorflow1.tensor_bundle import EntryProto, HeaderProto

RESTART = bytes(4) + (1).to_bytes(4, "little")
DEEP = "[" * 200_000
EMBEDDING = "electra/embeddings/word_embeddings"
Hostile = Callable[[Path], None]


def table_of(
    block: bytes, *, kind: int = 0, index: bytes | None = None, index_kind: int = 0
) -> bytes:
    """A table with one data block, checksums right; `index` takes the place of its index."""

    def sealed(content: bytes, kind: int) -> bytes:
        stored = content + bytes([kind])
        return stored + checksum(stored).to_bytes(4, "little")

    data = sealed(block, kind)
    meta = sealed(RESTART, 0)
    handle = varint(0) + varint(len(block))
    if index is None:
        index = varint(0) + varint(1) + varint(len(handle)) + b"z" + handle + RESTART
    footer = varint(len(data)) + varint(len(RESTART))
    footer += varint(len(data) + len(meta)) + varint(len(index))
    footer += bytes(40 - len(footer)) + sorted_table.MAGIC.to_bytes(8, "little")
    return data + meta + sealed(index, index_kind) + footer


def entry_of(shared: int, key: bytes, value: bytes) -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


# --- TensorFlow: the index ---

HEADER = entry_of(0, b"", HeaderProto(num_shards=1).SerializeToString())


def _index(content: bytes) -> Hostile:
    return lambda folder: (folder / "model.ckpt-7.index").write_bytes(content) and None


def _entries(change: Callable[[dict[bytes, bytes]], None]) -> Hostile:
    """The index with other entries, checksums right."""

    def make(folder: Path) -> None:
        path = folder / "model.ckpt-7.index"
        rows = dict(sorted_table.read_table(path.read_bytes()))
        change(rows)
        path.write_bytes(sorted_table.write_table(sorted(rows.items())))

    return make


def _entry(name: str = EMBEDDING, size_of_data: int = 0, **fields) -> Hostile:
    """One variable with other claims; the data file is made `size_of_data` long, of holes."""

    def make(folder: Path) -> None:
        def change(rows):
            entry = EntryProto.FromString(rows[name.encode()])
            shape = fields.pop("shape", None)
            for field, value in fields.items():
                setattr(entry, field, value)
            if shape is not None:
                entry.ClearField("shape")
                entry.shape.SetInParent()
                for size in shape:
                    entry.shape.dim.add(size=size)
            rows[name.encode()] = entry.SerializeToString()

        _entries(change)(folder)
        if size_of_data:
            os.truncate(folder / "model.ckpt-7.data-00000-of-00001", size_of_data)

    return make


def _copies() -> bytes:
    """Snappy: one long literal, then copies of one byte, each from its beginning."""
    literal, count = bytes(700_000), 100_000
    packed = bytes([62 << 2]) + (len(literal) - 1).to_bytes(3, "little") + literal
    packed += (bytes([3]) + len(literal).to_bytes(4, "little")) * count
    return varint(len(literal) + count) + packed


def _long_keys(first: bytes = b"", value: bytes = b"") -> bytes:
    """Keys that share 4,000 bytes with the one before."""
    block = first + entry_of(0, b"k" * 4_000, value)
    return block + b"".join(
        entry_of(4_000, i.to_bytes(3, "big"), value) for i in range(300_000)
    ) + RESTART  # fmt: skip


def _many_entries(count: int) -> bytes:
    return HEADER + b"".join(entry_of(0, i.to_bytes(3, "big"), b"") for i in range(1, count))


def _many_blocks(count: int) -> bytes:
    handle = varint(0) + varint(len(RESTART))
    entries = (entry_of(0, i.to_bytes(3, "big"), handle) for i in range(count))
    return b"".join(entries) + RESTART


def _nested(depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = bytes([2 << 3 | 2]) + varint(len(data)) + data
    return data


def _many_dimensions(rows):
    entry = EntryProto(dtype=1, shape={"dim": [{"size": 1}] * 400_000}, size=4)
    rows[EMBEDDING.encode()] = entry.SerializeToString()


def _many_variables(rows):
    value = next(v for k, v in rows.items() if k.endswith(b"/key/kernel"))
    for i in range(40_000):
        rows[f"electra/encoder/layer_{i}/attention/self/key/kernel".encode()] = value


def _header(**fields) -> Hostile:
    def change(rows):
        rows[b""] = HeaderProto(**fields).SerializeToString()

    return _entries(change)


def _instead(name: str, make: Callable[[Path], object]) -> Hostile:
    """Something else in the place of a file."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return change


def _write(name: str, content: str | bytes) -> Hostile:
    data = content.encode() if isinstance(content, str) else content
    return _instead(name, lambda path: path.write_bytes(data))


def _later(make: Callable[[], Hostile]) -> Hostile:
    """What is large is made when it is wanted: all of it takes seconds, in every test process."""
    return lambda folder: make()(folder)


TENSORFLOW: dict[str, Hostile] = {
    "snappy, copies from far": _later(lambda: _index(table_of(_copies(), kind=1))),
    "snappy, claims 2**40": _index(table_of(varint(1 << 40) + b"\0a", kind=1)),
    "snappy, claims 2**32 - 1": _index(table_of(varint((1 << 32) - 1) + b"\0a", kind=1)),
    "snappy, claims 30 times": _index(table_of(varint(30_000) + bytes(1_000), kind=1)),
    "snappy, index of blocks": _later(
        lambda: _index(table_of(RESTART, index=_copies(), index_kind=1))
    ),
    "unknown compression": _index(table_of(RESTART, kind=7)),
    "keys that share their beginnings": _later(lambda: _index(table_of(_long_keys(HEADER)))),
    "keys of blocks that share theirs": _later(
        lambda: _index(table_of(RESTART, index=_long_keys(value=varint(0) + varint(len(RESTART)))))
    ),
    "half a million entries": _later(lambda: _index(table_of(_many_entries(500_000) + RESTART))),
    "a hundred thousand blocks": _later(
        lambda: _index(table_of(RESTART, index=_many_blocks(200_000)))
    ),
    "restarts that are not there": _index(table_of(bytes(4) + b"\xff" * 4)),
    "an index of 5 MB": _later(lambda: _index(table_of(bytes(5_000_000)))),
    "a header that nests": _entries(lambda rows: rows.update({b"": _nested(20_000)})),
    "an entry that nests": _entries(lambda rows: rows.update({b"x": _nested(20_000)})),
    "dimensions, 400,000": _entries(_many_dimensions),
    "layers, 40,000": _entries(_many_variables),
    "layers, one of number 10**18": _entries(
        lambda rows: rows.update({b"electra/encoder/layer_999999999999999999/x": b""})
    ),
    "no data files": _header(num_shards=0),
    "data files, 65,536": _header(num_shards=65_536),
    "data files, 2**63": _header(num_shards=1 << 63),
    "big-endian": _header(num_shards=1, endianness=1),
    "of the future": _header(num_shards=1, version={"min_consumer": 9}),
    "a table of 400 GB": _entry(shape=(1 << 20, 100_000), size=1 << 20, size_of_data=1 << 40),
    "4 TB that the data file has": _entry(
        shape=(1_000_000, 1_000_000), size=4 * 10**12, offset=0, size_of_data=1 << 42
    ),
    "a shape of 2**64 numbers": _entry(shape=(1 << 32, 1 << 32), size=0),
    "a shape of -1": _entry(shape=((1 << 64) - 1, 2), size=16),
    "a shape of nothing": _entry(shape=(), size=4),
    "a shape of zeros": _entry(shape=(0, 0), size=0),
    "an offset of 2**63": _entry(offset=1 << 63),
    "a size of 2**63": _entry(size=1 << 63),
    "the second data file": _entry(shard=1),
    "float64 weights": _entry(dtype=2, size=0, shape=(0, 2)),
    "weights that are integers": _entry(dtype=3),
    "weights that are strings": _entry(dtype=7),
    "a step of floats": _entry("global_step", dtype=2),
    "a step of a million numbers": _entry("global_step", shape=(1,)),
    "index is a folder": _instead("model.ckpt-7.index", Path.mkdir),
    "index is a pipe": _instead("model.ckpt-7.index", os.mkfifo),
    "data is a folder": _instead("model.ckpt-7.data-00000-of-00001", Path.mkdir),
    "data is a pipe": _instead("model.ckpt-7.data-00000-of-00001", os.mkfifo),
    "data is itself": _instead(
        "model.ckpt-7.data-00000-of-00001", lambda path: path.symlink_to(path.name)
    ),
    "a state of binary": _write("checkpoint", bytes(range(256)) * 1_000),
    "a state of another": _write("checkpoint", 'model_checkpoint_path: "' + "x/" * 9_999 + '"\n'),
    "heads that nest": _write("bert_config.json", DEEP),
    "a mark that nests": _write("exported_by_convbert_jax.json", DEEP),
    "a mark of words": _write("exported_by_convbert_jax.json", '{"mask_convolution": "no"}'),
    "a vocabulary that nests": _write("tokenizer.json", DEEP),
}


# --- Hugging Face ---


def _config(**fields) -> Hostile:
    def make(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(content))

    return make


def safetensors_of(header: bytes | dict, data: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text + data


def _safetensors(*arguments) -> Hostile:
    return _write("model.safetensors", safetensors_of(*arguments))


def _tensor(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def _retype(kind: str) -> Hostile:
    """Every tensor as another type of the same width, or of a quarter of it with four times the
    numbers.
    """

    def make(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        for name, tensor in header.items():
            if name != "__metadata__":
                tensor["dtype"] = kind
                tensor["shape"] += [4] if "8" in kind else []
        (folder / "model.safetensors").write_bytes(safetensors_of(header, data[size:]))

    return make


def _shards(table, file: str = "model.safetensors.index.json") -> Hostile:
    def make(folder: Path) -> None:
        os.rename(folder / "model.safetensors", folder / "a.safetensors")
        text = table if isinstance(table, str) else json.dumps({"weight_map": table})
        (folder / file).write_text(text)

    return make


def _both_shards(folder: Path) -> None:
    """Two shards with the same tensors: which one is right?"""
    data = (folder / "model.safetensors").read_bytes()
    for name in "ab":
        (folder / f"{name}.safetensors").write_bytes(data)
    table = {"one": "a.safetensors", "two": "b.safetensors"}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def _pickled(make: Callable[[Path, dict], None]) -> Hostile:
    """pytorch_model.bin in the place of the other file, by `make(path, tensors)`."""

    def change(folder: Path) -> None:
        pytest.importorskip("torch")
        from safetensors.torch import load_file

        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        make(folder / "pytorch_model.bin", tensors)

    return change


def _save(change: Callable[..., object], **options) -> Hostile:
    """What torch.save writes of `change(torch, tensors)`."""

    def make(path: Path, tensors: dict) -> None:
        import torch

        torch.save(change(torch, tensors), path, **options)

    return _pickled(make)


def _deflated(extra: int) -> Hostile:
    """Compressed parts, which PyTorch unpacks; with `extra` zeros they are a bomb."""

    def make(path: Path, tensors: dict) -> None:
        import torch

        big = tensors | ({"zeros": torch.zeros(extra)} if extra else {})
        plain = path.with_suffix(".plain")
        torch.save(big, plain)
        with zipfile.ZipFile(plain) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
            for part in old.infolist():
                new.writestr(part.filename, old.read(part))
        plain.unlink()

    return _pickled(make)


def _giant_legacy(numbers: int) -> Hostile:
    """The format of before 2020, whose storages claim `numbers` each; the data say the same."""

    def make(path: Path, tensors: dict) -> None:
        import torch

        torch.save({_WEIGHT: tensors[_WEIGHT]}, path, _use_new_zipfile_serialization=False)
        count = tensors[_WEIGHT].numel()
        old = b"M" + struct.pack("<H", count) + b"Nt"  # BININT2, NONE, TUPLE
        new = b"\x8a\x06" + numbers.to_bytes(6, "little") + b"Nt"  # LONG1
        data = path.read_bytes()
        assert data.count(old) == 1
        data = data.replace(old, new)
        path.write_bytes(data.replace(struct.pack("<q", count), struct.pack("<q", numbers)))

    return _pickled(make)


class _Executes:
    def __reduce__(self):
        return (os.system, ("touch executed",))


def _many_parts(path: Path, tensors: dict) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(20_000):
            archive.writestr(f"archive/data/{i}", b"")


def _cut(name: str, size: int) -> Hostile:
    return lambda folder: os.truncate(folder / name, size)


def _generator(make: Callable[[Path], object]) -> Hostile:
    def change(folder: Path) -> None:
        (folder / "generator").mkdir()
        make(folder / "generator")

    return change


_FIELDS = (
    "vocab_size", "hidden_size", "embedding_size", "num_hidden_layers", "num_attention_heads",
    "intermediate_size", "max_position_embeddings", "type_vocab_size", "conv_kernel_size",
    "num_groups", "head_ratio",
)  # fmt: skip
_VALUES = (0, -1, 1.5, True, None, "7", [], {}, 1 << 20, 10**30, 1e308, float("nan"))
_WEIGHT = "embeddings.word_embeddings.weight"
HUGGING_FACE: dict[str, Hostile] = {
    **{f"{field}={value!r}": _config(**{field: value}) for field in _FIELDS for value in _VALUES},
    "all sizes 2**20": _config(**dict.fromkeys(_FIELDS, 1 << 20)),
    "all sizes 2**20, one head": _config(
        **dict.fromkeys(_FIELDS, 1 << 20) | {"num_attention_heads": 2, "head_ratio": 2}
    ),
    "model_type of 100,000 letters": _config(model_type="x" * 100_000),
    "model_type of a list": _config(model_type=[]),
    "architectures of numbers": _config(architectures=[7]),
    "epsilon infinite": _config(layer_norm_eps=float("inf")),
    "labels by the million": _later(
        lambda: _config(id2label={str(i): "x" for i in range(300_000)})
    ),
    "config, empty": _write("config.json", ""),
    "config, a list": _write("config.json", "[]"),
    "config, null": _write("config.json", "null"),
    "config, not UTF-8": _write("config.json", b"\xff\xfe{"),
    "config, nested": _write("config.json", DEEP),
    "config, nested objects": _write("config.json", '{"a":' * 100_000),
    "config, half a pair": _write("config.json", '{"model_type": "\\ud800"}'),
    "config, a number of 100,000 digits": _write("config.json", '{"a": ' + "9" * 100_000 + "}"),
    "config, 40 MB": _later(lambda: _write("config.json", "[" + "[]," * 13_000_000 + "[]]")),
    "config, a pipe": _instead("config.json", os.mkfifo),
    "config, a folder": _instead("config.json", Path.mkdir),
    "header of 2**63": _safetensors(b"{}", b"", 1 << 63),
    "header of 2**40": _safetensors(b"{}", b"", 1 << 40),
    "header of nothing": _safetensors(b""),
    "header that nests": _safetensors(DEEP.encode()),
    "header, a list": _safetensors(b"[]"),
    "tensors, 200,000": _later(
        lambda: _safetensors(
            {
                f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(200_000)
            }
        )
    ),
    "tensor of 2**80 numbers": _safetensors(_tensor(shape=(1 << 40, 1 << 40)), bytes(4)),
    "tensor of 2**62 nothings": _safetensors(_tensor(shape=(1 << 62, 0), offsets=(0, 0))),
    "tensor of -1": _safetensors(_tensor(shape=(-1,)), bytes(4)),
    "tensor that ends before it begins": _safetensors(_tensor(offsets=(4, 0)), bytes(4)),
    "tensor outside": _safetensors(_tensor(offsets=(1 << 40, (1 << 40) + 4)), bytes(4)),
    "tensor of an unknown type": _safetensors(_tensor("F3"), bytes(4)),
    "tensor of 40 dimensions": _safetensors(_tensor(shape=(1,) * 40), bytes(4)),
    "tensor of 100,000 dimensions": _safetensors(_tensor(shape=(1,) * 100_000), bytes(4)),
    "a file of holes": lambda folder: os.truncate(folder / "model.safetensors", 1 << 40),
    "weights as integers": _retype("I32"),
    "weights as unsigned": _retype("U32"),
    "weights as eight bits": _retype("F8_E4M3"),
    "weights are a pipe": _instead("model.safetensors", os.mkfifo),
    **{f"weights of {size} bytes": _cut("model.safetensors", size) for size in (0, 1, 8, 9, 999)},
    "shard of 5,000 letters": _shards({_WEIGHT: "a" * 5_000}),
    "shard above": _shards({_WEIGHT: "../a.safetensors"}),
    "shard of the system": _shards({_WEIGHT: "/etc/passwd"}),
    "shard without a name": _shards({_WEIGHT: ""}),
    "shard .": _shards({_WEIGHT: "."}),
    "shard ..": _shards({_WEIGHT: ".."}),
    "shard with a zero": _shards({_WEIGHT: "a\0b"}),
    "shard of half a pair": _shards('{"weight_map": {"x": "\\ud800"}}'),
    "shard null": _shards({_WEIGHT: None}),
    "shard list": _shards({_WEIGHT: ["a.safetensors"]}),
    "shards, a list": _shards(["a.safetensors"]),
    "shards that nest": _shards(DEEP),
    "shards, 100,000": _later(
        lambda: _shards({f"x{i}": f"{i}.safetensors" for i in range(100_000)})
    ),
    "shards without all": _shards({"one more": "a.safetensors"}),
    "shards with the same": _both_shards,
    "a stride of 0": _save(lambda torch, t: t | {_WEIGHT: torch.zeros(1).expand(1 << 37)}),
    "a stride of 0, as it should be": _save(
        lambda torch, t: t | {"x": torch.zeros(1).expand(1 << 18, 1 << 19)}
    ),
    "views, 10,000": _save(
        lambda torch, t: t | dict.fromkeys(map(str, range(10_000)), torch.zeros(100_000))
    ),
    "deflated": _deflated(0),
    "deflated, a bomb": _deflated(10_000_000),
    "legacy, a storage of 2**40": _giant_legacy(1 << 40),
    "legacy, a storage of 2**32": _giant_legacy(1 << 32),
    "executes": _save(lambda torch, t: {"x": _Executes()}),
    "executes, legacy": _pickled(lambda path, t: path.write_bytes(pickle.dumps(_Executes()))),
    "a tensor, no table": _save(lambda torch, t: t[_WEIGHT]),
    "a list": _save(lambda torch, t: list(t.values())),
    "tables of tables": _save(lambda torch, t: {"model": t}),
    "names of numbers": _save(lambda torch, t: dict(enumerate(t.values()))),
    "a list that holds itself": _save(lambda torch, t: [t.setdefault("me", t)]),
    "sparse": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT].to_sparse()}),
    "sparse, giant": _save(
        lambda torch, t: t | {_WEIGHT: torch.sparse_coo_tensor(size=(1 << 30, 1 << 30))}
    ),
    "on no device": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT].to("meta")}),
    "complex": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT].to(torch.complex64)}),
    "quantized": _save(
        lambda torch, t: t | {_WEIGHT: torch.quantize_per_tensor(t[_WEIGHT], 0.1, 0, torch.qint8)}
    ),
    "eight bits": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT].to(torch.float8_e4m3fn)}),
    "integers": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT].to(torch.int8)}),
    "not a number": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT] * float("nan")}),
    "infinite": _save(lambda torch, t: t | {_WEIGHT: t[_WEIGHT] / 0}),
    "archive of 20,000 parts": _pickled(_many_parts),
    "archive cut off": _pickled(lambda path, t: path.write_bytes(b"PK\x03\x04" + bytes(100))),
    "archive of nothing": _pickled(lambda path, t: path.write_bytes(b"")),
    "archive of noise": _pickled(
        lambda path, t: path.write_bytes(np.random.default_rng(0).bytes(5_000))
    ),
    "generator, nothing in it": _generator(lambda folder: None),
    "generator, nested": _generator(lambda folder: (folder / "config.json").write_text(DEEP)),
    "generator, no weights": _generator(
        lambda folder: (folder / "config.json").write_text('{"model_type": "convbert"}')
    ),
    "generator, a pipe": _generator(lambda folder: os.mkfifo(folder / "config.json")),
    "mark that nests": _write("exported_by_convbert_jax.json", DEEP),
    "mark of another": _write(
        "exported_by_convbert_jax.json", '{"crc32c": {"model.safetensors": 7}}'
    ),
    "mark without sums": _write("exported_by_convbert_jax.json", '{"crc32c": []}'),
    "use that nests": _config(convbert_jax={"use": []}),
    "a problem of lists": _config(problem_type=[]),
    "step of words": _config(convbert_jax={"step": "many"}),
    "step of 10**30": _config(convbert_jax={"step": 10**30}),
    "vocabulary that nests": _write("tokenizer.json", DEEP),
    "vocabulary of lists": _write("tokenizer.json", '{"model": [], "normalizer": []}'),
    "vocabulary settings that nest": lambda folder: [
        (folder / "vocab.txt").write_text("[PAD]\n"),
        (folder / "tokenizer_config.json").write_text(DEEP),
    ],
    "vocabulary settings of words": lambda folder: [
        (folder / "vocab.txt").write_text("[PAD]\n"),
        (folder / "tokenizer_config.json").write_text('{"do_lower_case": "maybe"}'),
    ],
    "vocabulary of words without end": lambda folder: [
        (folder / "vocab.txt").write_text("[PAD]\n"),
        (folder / "tokenizer.json").write_text('{"model": {"max_input_chars_per_word": 1e9}}'),
    ],
}
