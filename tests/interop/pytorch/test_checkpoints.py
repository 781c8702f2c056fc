"""Files of torch.save, read without it: every tensor to the bit, and what is damaged or hostile in
one sentence.
"""

import argparse
import collections
import os
import pathlib
import pickle
import random
import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from convbert_jax.config import UserError
from convbert_jax.interop.pytorch.checkpoint import Checkpoint, Tensor
from tests.interop.test_hostile_files import limits

torch = pytest.importorskip("torch")

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
FLIPS = int(os.environ.get("CONVBERT_FLIPS", "200"))
FORMATS = pytest.mark.parametrize("archive", [True, False], ids=["archive", "single file"])


def tensors():
    torch.manual_seed(0)
    base = torch.randn(5, 6)
    return collections.OrderedDict(
        whole=base, turned=base.T, part=base[1:4, ::2], row=base[2], number=torch.tensor(3.5),
        none=torch.zeros(0, 4), half=torch.randn(7).half(), brain=torch.randn(7).bfloat16(),
        learned=torch.nn.Parameter(torch.randn(2, 3)), counts=torch.arange(4),
        truths=torch.tensor([True, False]), bytes=torch.arange(3, dtype=torch.uint8),
        small=torch.arange(3, dtype=torch.int16),
    )  # fmt: skip


def save(path, content, archive=True):
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    return path


@FORMATS
def test_tensors_come_back_to_the_bit(tmp_path, archive):
    content = {
        "model": tensors(),
        "args": argparse.Namespace(a=[1, (2, "x")], b=None),
        "best": np.float64(2.5),
        "state": torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))]).state_dict(),
    }
    checkpoint = Checkpoint(save(tmp_path / "x.pt", content, archive))
    found = checkpoint.read(checkpoint.content["model"])
    assert list(found) == list(content["model"])
    for name, tensor in content["model"].items():
        wanted = tensor.detach()
        wanted = (wanted.float() if wanted.is_floating_point() else wanted).numpy()
        assert found[name].dtype == wanted.dtype
        np.testing.assert_array_equal(found[name], wanted)
        assert found[name].flags.c_contiguous
    assert checkpoint.content["args"].state == {"a": [1, (2, "x")], "b": None}


def test_pytorch_is_not_needed(tmp_path):
    path = save(tmp_path / "x.pt", {"w": torch.ones(2, 3)})
    program = (
        "import sys, pathlib; sys.modules['torch'] = None\n"
        "from convbert_jax.interop.pytorch.checkpoint import Checkpoint\n"
        f"found = Checkpoint(pathlib.Path({str(path)!r}))\n"
        "print(found.read(found.content)['w'].sum())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY, check=True
    )
    assert ended.stdout.strip() == "6.0"


def test_only_the_numbers_that_are_asked_for_are_read(tmp_path):
    """Those of an optimizer may be damaged."""
    path = save(tmp_path / "x.pt", {"model": {"w": torch.ones(3)}, "rest": torch.full((50,), 7.0)})
    content = path.read_bytes()
    numbers = struct.pack("<50f", *[7.0] * 50)
    assert content.count(numbers) == 1
    path.write_bytes(content.replace(numbers, numbers[:-1] + b"?"))
    checkpoint = Checkpoint(path)
    np.testing.assert_array_equal(checkpoint.read(checkpoint.content["model"])["w"], np.ones(3))
    with pytest.raises(UserError, match="CRC"):
        checkpoint.read({"rest": checkpoint.content["rest"]})


@FORMATS
def test_doubles_are_refused(tmp_path, archive):
    checkpoint = Checkpoint(save(tmp_path / "x.pt", {"w": torch.ones(3).double()}, archive))
    with pytest.raises(UserError, match="'w' is of a type that is not exact in float32"):
        checkpoint.read(checkpoint.content)


# --- Damage ---


def read_or_refuse(path):
    """Names and bytes of all tensors, or the sentence."""
    with limits():
        try:
            checkpoint = Checkpoint(path)
            content = checkpoint.content if isinstance(checkpoint.content, dict) else {}
            there = {name: t for name, t in content.items() if isinstance(t, Tensor)}
            found = checkpoint.read(there)
        except UserError as error:
            text = str(error)
            assert "\n" not in text
            assert len(text) < 600
            assert str(path) in text
            return text
    return {name: (array.shape, array.tobytes()) for name, array in found.items()}


@FORMATS
def test_no_flipped_bit_of_an_archive_is_read_as_a_value(tmp_path, archive):
    """In a single file nothing tells a flipped number; there it is no traceback."""
    rng = random.Random(FLIPS)
    path = save(tmp_path / "x.pt", dict(tensors()), archive)
    good = path.read_bytes()
    whole = read_or_refuse(path)
    refused = 0
    for _ in range(FLIPS):
        content = bytearray(good)
        content[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        found = read_or_refuse(path)
        refused += isinstance(found, str)
        if archive and not isinstance(found, str):
            assert found == whole
    assert refused > FLIPS / 20


@FORMATS
def test_a_file_that_was_cut_off_is_refused(tmp_path, archive):
    path = save(tmp_path / "x.pt", dict(tensors()), archive)
    good = path.read_bytes()
    for size in [*range(0, 40), *range(40, len(good), 97), len(good) - 1]:
        path.write_bytes(good[:size])
        assert isinstance(read_or_refuse(path), str), size


# --- Hostile files ---


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    encoded = pickle.encode_long(value)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def numbers(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(kind="FloatStorage", key="0", size=4, behind=b""):
    named = b"ctorch\n" + kind.encode() + b"\n"
    return b"(" + text("storage") + named + text(key) + text("cpu") + number(size) + behind + b"tQ"


def tensor(stored=None, offset=0, shape=(4,), strides=(1,)):
    stored = storage() if stored is None else stored
    arguments = stored + number(offset) + numbers(*shape) + numbers(*strides) + b"\x89"
    arguments += b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR"


def table(*values):
    pairs = (text(f"t{i}") + value for i, value in enumerate(values))
    return b"\x80\x02}(" + b"".join(pairs) + b"u."


def pack(content, parts=None, **settings):
    """An archive, as a function of its path."""
    parts = {"data/0": struct.pack("<4f", 1, 2, 3, 4)} if parts is None else parts

    def write(path):
        with zipfile.ZipFile(path, "w") as file:
            for name, value in {"data.pkl": content, "version": b"3\n", **parts}.items():
                file.writestr(f"archive/{name}", value, **settings)

    return write


FOUR = struct.pack("<q4f", 4, 1, 2, 3, 4)


def single(content, keys=("0",), behind=FOUR, head=None):
    head = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}) if head is None else head

    def write(path):
        start = b"".join(pickle.dumps(part, 2) for part in head)
        path.write_bytes(start + content + pickle.dumps(list(keys), 2) + behind)

    return write


def holes(path):
    path.touch()
    os.truncate(path, 1 << 40)


ONE, OLD = table(tensor()), table(tensor(storage(behind=b"N")))
HOSTILE = {
    "a stride of 0": pack(table(tensor(shape=(1 << 40,), strides=(0,)))),
    "two strides of 0": pack(table(tensor(shape=(1 << 20, 1 << 20), strides=(0, 0)))),
    "many views": pack(table(*[tensor(shape=(999, 4), strides=(0, 1))] * 99)),
    "a stride below 0": pack(table(tensor(strides=(-1,)))),
    "a shape below 0": pack(table(tensor(shape=(-4,)))),
    "a place below 0": pack(table(tensor(offset=-1))),
    "a place behind the end": pack(table(tensor(offset=1))),
    "a place far behind the end": pack(table(tensor(offset=1 << 61, shape=(1,)))),
    "strides that leave": pack(table(tensor(shape=(2, 2), strides=(1 << 61, 1)))),
    "a number too long": pack(table(tensor(shape=(1 << 70,), strides=(0,)))),
    "fewer strides": pack(table(tensor(shape=(2, 2), strides=(1,)))),
    "40 dimensions": pack(table(tensor(shape=(1,) * 40, strides=(1,) * 40))),
    "a shape of words": pack(
        table(tensor(shape=(), strides=()).replace(b"(t(t", b"(X\x01\x00\x00\x00at(t"))
    ),
    "a storage larger than the file": pack(table(tensor(storage(size=1 << 40)))),
    "a storage smaller than its part": pack(table(tensor(storage(size=3), shape=(3,)))),
    "a storage below 0": pack(table(tensor(storage(size=-4)))),
    "a storage of two sizes": pack(table(tensor(), tensor(storage(size=3), shape=(3,)))),
    "a storage that is not there": pack(table(tensor(storage(key="7")))),
    "a storage above": pack(table(tensor(storage(key="../data.pkl")))),
    "a storage that is a view": pack(table(tensor(storage(behind=numbers(1, 2))))),
    "a storage of an unknown type": pack(table(tensor(storage("QInt8Storage")))),
    "a storage of complex numbers": pack(table(tensor(storage("ComplexFloatStorage")))),
    "a tensor of no storage": pack(table(tensor(number(7)))),
    "a tensor of nothing": pack(table(b"ctorch._utils\n_rebuild_tensor_v2\n)R")),
    "compressed": pack(ONE, compress_type=zipfile.ZIP_DEFLATED),
    "a bomb": pack(ONE, {"data/0": bytes(1 << 26)}, compress_type=zipfile.ZIP_DEFLATED),
    "two contents": pack(ONE, {"data/0": bytes(16), "more/data.pkl": ONE}),
    "no content": pack(ONE, {}),
    "big-endian": pack(ONE, {"data/0": bytes(16), "byteorder": b"big"}),
    "executes": pack(b"cos\nsystem\n(" + text("touch executed") + b"tR."),
    "executes, single file": single(b"cos\nsystem\n(" + text("touch executed") + b"tR."),
    "executes as its number": single(OLD, head=(0x1950A86A20F9469CFC6C, 1001, [])),
    "plain pickle": lambda path: path.write_bytes(pickle.dumps({"a": 1})),
    "single file of another version": single(OLD, head=(0x1950A86A20F9469CFC6C, 1002, {})),
    "single file, big-endian": single(
        ONE, head=(0x1950A86A20F9469CFC6C, 1001, {"little_endian": False})
    ),
    "single file, other keys": single(OLD, keys=("1",)),
    "single file, a key twice": single(OLD, keys=("0", "0")),
    "single file, no keys": single(OLD, keys=(), behind=b""),
    "single file, keys of numbers": single(OLD, keys=(0,)),
    "single file, another size": single(OLD, behind=struct.pack("<q4f", 5, 1, 2, 3, 4)),
    "single file, a size of 2**62": single(OLD, behind=struct.pack("<q4f", 1 << 62, 1, 2, 3, 4)),
    "single file, too short": single(OLD, behind=struct.pack("<q3f", 4, 1, 2, 3)),
    "single file, too long": single(OLD, behind=struct.pack("<q5f", 4, 1, 2, 3, 4, 5)),
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5_000)),
    "noise behind PK": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "nothing": lambda path: path.touch(),
    "a pipe": os.mkfifo,
    "a folder": pathlib.Path.mkdir,
    "a file of holes": holes,
    "not there": lambda path: None,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    HOSTILE[name](tmp_path / "x.pt")
    assert isinstance(read_or_refuse(tmp_path / "x.pt"), str)
    assert not (tmp_path / "executed").exists()


def test_what_is_made_here_is_read_where_it_is_sound(tmp_path):
    for write in (pack(ONE), single(OLD)):
        write(tmp_path / "x.pt")
        found = read_or_refuse(tmp_path / "x.pt")
        assert found == {"t0": ((4,), struct.pack("<4f", 1, 2, 3, 4))}
        loaded = torch.load(tmp_path / "x.pt", weights_only=True)
        assert loaded["t0"].tolist() == [1, 2, 3, 4]
