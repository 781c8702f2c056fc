"""PyTorch files: tensors are bit-identical, damage is refused, no code is executed."""

import argparse
import collections
import os
import pathlib
import random
import struct
import sys
import types
import zipfile

import numpy as np
import pytest

from convbert_jax.interop import huggingface, sources, weight_files
from convbert_jax.interop.fairseq import read as read_fairseq
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.weight_files import read_weights
from tests.interop.conftest import limits, random_network
from tests.refusals import refused

FLIPS = int(os.environ.get("CONVBERT_FLIPS", "100"))
FORMATS = pytest.mark.parametrize("archive", [True, False], ids=["archive", "single file"])


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tensors(torch):
    torch.manual_seed(0)
    base = torch.randn(5, 6)
    return collections.OrderedDict(
        whole=base, turned=base.T, part=base[1:4, ::2], row=base[2], number=torch.tensor(3.5),
        none=torch.zeros(0, 4), half=torch.randn(7).half(), brain=torch.randn(7).bfloat16(),
        learned=torch.nn.Parameter(torch.randn(2, 3)), counts=torch.arange(4),
        truths=torch.tensor([True, False]), bytes=torch.arange(3, dtype=torch.uint8),
        small=torch.arange(3, dtype=torch.int16),
    )  # fmt: skip


@pytest.fixture
def save(torch, tmp_path):
    def save(content, archive=True, name="x.pt"):
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=archive)
        return tmp_path / name

    return save


def read_or_refuse(path) -> dict[str, tuple] | str:
    """Return {name: (dtype, shape, bytes)} of all tensors, or the error message."""
    with limits():
        try:
            found = weight_files.to_arrays(path, weight_files.read_pytorch(path))
            refusal = None
        except ConversionError as error:
            refusal = error
    if refusal:
        assert refusal.path == str(path)
        assert "\n" not in str(refusal)
        return str(refusal)
    return {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()}


@FORMATS
def test_tensors_come_back_to_the_bit(save, tensors, torch, archive):
    content = {
        "model": tensors,
        "args": argparse.Namespace(a=[1, (2, "x")], b=None),
        "best": np.float64(2.5),
        "state": torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))]).state_dict(),
        "dict": collections.defaultdict(list, a=[1]),
    }
    path = save(content, archive)
    found = weight_files.read_pytorch(path)
    arrays = weight_files.to_arrays(path, found["model"])
    assert list(arrays) == list(tensors)
    path.unlink()
    for name, tensor in tensors.items():
        wanted = tensor.detach()
        wanted = (wanted.float() if wanted.is_floating_point() else wanted).numpy()
        assert arrays[name].dtype == wanted.dtype
        np.testing.assert_array_equal(arrays[name], wanted)
        assert arrays[name].flags.c_contiguous
    assert found["args"] == content["args"]
    assert found["dict"] == {"a": [1]}


def test_other_classes_of_fairseq_are_not_imported(save, monkeypatch):
    module = types.ModuleType("omegaconf")
    module.Node = type("Node", (), {"__module__": "omegaconf"})
    monkeypatch.setitem(sys.modules, "omegaconf", module)
    node = module.Node()
    node.kind = str
    path = save([node])
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    (found,) = weight_files.read_pytorch(path)
    assert (found.name, found.arguments) == ("omegaconf.Node", ())
    assert found.state["kind"].name == "builtins.str"


@FORMATS
def test_float64_is_refused(save, torch, archive):
    path = save({"w": torch.ones(3).double()}, archive)
    with refused(ConversionError, "'w'", "float64", path=path):
        weight_files.to_arrays(path, weight_files.read_pytorch(path))


def test_a_file_without_tensors_is_refused(save):
    for content in ([1], {"a": 1}, {1: 2}, None):
        assert isinstance(read_or_refuse(save(content)), str)


@pytest.mark.parametrize("version", [None, "2.5.1"])
def test_without_a_safe_pytorch_an_error_names_the_extra(save, torch, monkeypatch, version):
    path = save({"w": torch.ones(2)})
    if version:
        monkeypatch.setattr(torch, "__version__", version)
    else:
        monkeypatch.setitem(sys.modules, "torch", None)
    with refused(ConversionError, "2.6", "[torch]", version or "PyTorch", path=path):
        weight_files.read_pytorch(path)
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    assert weight_files.read_pytorch(path)["w"].tolist() == [1, 1]


@FORMATS
def test_no_flipped_bit_of_an_archive_changes_a_value(save, tensors, archive):
    """Files from before zip archives have no checksums; there a flip only must not crash."""
    rng = random.Random(FLIPS)
    path = save(dict(tensors), archive)
    good = path.read_bytes()
    whole = read_or_refuse(path)
    refusals = 0
    for _ in range(FLIPS):
        content = bytearray(good)
        content[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        found = read_or_refuse(path)
        refusals += isinstance(found, str)
        assert isinstance(found, str) or found == whole or not archive
    assert refusals > FLIPS / 20


@FORMATS
def test_a_truncated_file_is_refused(save, tensors, archive):
    path = save(dict(tensors), archive)
    good = path.read_bytes()
    for size in [*range(0, 9), *range(40, len(good), 397), len(good) - 1]:
        path.write_bytes(good[:size])
        assert isinstance(read_or_refuse(path), str), size


def test_tensors_without_an_exact_array_are_refused(save, torch, tmp_path):
    weight = torch.ones(2, 2)
    for other in (
        *(weight.to(torch.complex64), weight.to_sparse(), weight.to("meta")),
        *(weight.to(torch.float8_e4m3fn), torch.sparse_coo_tensor(size=(1 << 30, 1 << 30))),
        torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    ):
        assert isinstance(read_or_refuse(save({"w": other})), str)


def test_a_folder_of_other_tensors_is_refused(save, torch, tmp_path):
    """Integer or non-finite weights, nested dictionaries, lists, and numeric keys."""
    network = random_network(mixer="attention")
    huggingface.write_network(tmp_path, network, pad_id=0)
    tensors = {k: torch.tensor(v) for k, v in huggingface.to_tensors(network).items()}
    (tmp_path / "model.safetensors").unlink()
    name = "electra.embeddings.word_embeddings.weight"
    for content in (
        *(tensors | {name: weight} for weight in (tensors[name].to(torch.int8),)),
        *(tensors | {name: tensors[name] * number} for number in (float("nan"), float("inf"))),
        *({"model": tensors}, list(tensors.values()), dict(enumerate(tensors.values()))),
    ):
        save(content, name="pytorch_model.bin")
        with refused(ConversionError):
            sources.read_source(str(tmp_path))


# --- Malicious files ---


class Runs:
    """Calls `function` when unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@FORMATS
@pytest.mark.parametrize(
    ("function", "argument"),
    [(os.system, "touch executed"), (eval, "open('executed', 'w')")],
    ids=["system", "eval"],
)
def test_nothing_is_executed(save, torch, archive, function, argument, tmp_path, monkeypatch):
    """Covers a Hugging Face folder and a fairseq checkpoint."""
    monkeypatch.chdir(tmp_path)
    payload, name = Runs(function, argument), function.__name__
    path = save({"weight": torch.ones(2), "more": payload}, archive, "pytorch_model.bin")
    with refused(ConversionError, name, path=path):
        read_weights(tmp_path)
    path = save({"args": payload, "model": {"w": torch.ones(2)}}, archive, "model.pt")
    with refused(ConversionError, name, path=path):
        read_fairseq(tmp_path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "name", ["torch.hub load", "builtins getattr", "omegaconf\nos system", "fairseq ", "numpy load"]
)
def test_names_beyond_the_list_are_refused(name, save, torch, tmp_path):
    """Nothing outside the list is imported."""
    path = save({"w": torch.ones(2)})
    pickle = b"\x80\x02c" + name.replace(" ", "\n").encode() + b"\n)R."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/version", b"3\n")
    assert isinstance(read_or_refuse(path), str)


def _views(torch):
    return {f"t{i}": torch.ones(4).expand(999, 4) for i in range(99)}


def _stride_0(torch):
    return {"w": torch.zeros(1).expand(1 << 40)}


def _rewrite(change):
    """Rewrite an archive with `change(name, content)`; None drops the part."""

    def rewrite(path, kind):
        with zipfile.ZipFile(path) as old:
            parts = {part.filename: old.read(part) for part in old.infolist()}
        with zipfile.ZipFile(path, "w", kind) as new:
            for name, content in parts.items():
                if (changed := change(name, content)) is not None:
                    new.writestr(name, changed)

    return rewrite


def _holes(path):
    path.write_bytes(b"")
    os.truncate(path, 1 << 40)


def _giant_storage(path):
    """Write a legacy file whose storage claims 2**40 elements in two places."""
    import torch

    torch.save({"w": torch.ones(300)}, path, _use_new_zipfile_serialization=False)
    old, new = b"M\x2c\x01Nt", b"\x8a\x06" + (1 << 40).to_bytes(6, "little") + b"Nt"
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(
        data.replace(old, new).replace(struct.pack("<q", 300), struct.pack("<q", 1 << 40))
    )


ZIP = {
    "compressed": (lambda name, content: content, zipfile.ZIP_DEFLATED),
    "a part is missing": (
        lambda name, content: None if name.endswith("/data/0") else content,
        zipfile.ZIP_STORED,
    ),
    "a part is smaller": (
        lambda name, content: content[:8] if name.endswith("/data/0") else content,
        zipfile.ZIP_STORED,
    ),
    "no pickle": (
        lambda name, content: None if name.endswith("/data.pkl") else content,
        zipfile.ZIP_STORED,
    ),
}
FILES = {
    "noise": lambda path: path.write_bytes(np.random.default_rng(0).bytes(5_000)),
    "noise after PK": lambda path: path.write_bytes(b"PK\x03\x04" + bytes(100)),
    "a file of holes": _holes,
    "a giant storage": _giant_storage,
    "a pipe": os.mkfifo,
    "a folder": pathlib.Path.mkdir,
    "absent": lambda path: None,
}


@pytest.mark.parametrize("name", [*ZIP, *FILES, "many views", "a stride of 0"])
def test_hostile_files_are_refused(name, save, torch, tmp_path):
    path = tmp_path / "x.pt"
    if name in FILES:
        FILES[name](path)
    elif name in ZIP:
        change, kind = ZIP[name]
        _rewrite(change)(save({"w": torch.zeros(1 << 20)}), kind)
    else:
        save(_views(torch) if name == "many views" else _stride_0(torch))
    assert isinstance(read_or_refuse(path), str)
