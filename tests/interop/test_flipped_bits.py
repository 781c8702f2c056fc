"""One flipped bit in a checkpoint file: correct values, an older checkpoint, or an error.

More flips: CONVBERT_FLIPS=500 python -m pytest tests/interop/test_flipped_bits.py -s
"""

import collections
import dataclasses
import os
import pathlib
import random
import shutil
import subprocess
import sys
import types
import warnings

import jax
import numpy as np
import pytest

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.data.tokenizer.tokenizer import load_tokenizer
from convbert_jax.finetuning.run import save_model
from convbert_jax.inference.loading import read_finetuned
from convbert_jax.interop import sources
from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training import optimizer, train_step
from convbert_jax.workdir import Workdir
from tests.interop.conftest import make_config, random_params

FLIPS = int(os.environ.get("CONVBERT_FLIPS", "8"))  # total over all readers
STEPS = (3, 4)
REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def place(tree):
    """Return the shapes of a state, placed on one device."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), tree)


def make_state(config, step: int):
    transformation = optimizer.make_optimizer(config.optimizer, config.train.steps)
    params = jax.tree.map(jax.numpy.asarray, random_params(config, seed=step))
    filled = train_step.create_state(params, transformation)
    moments = jax.tree.map(lambda leaf: leaf + step, filled.opt_state)
    return train_step.TrainState(jax.numpy.asarray(step, jax.numpy.int32), params, moments)


@dataclasses.dataclass
class Reader:
    """A function that reads a checkpoint.

    Attributes:
      folder: the folder to read.
      read: read(folder) -> a tree of arrays, different for each step.
      steps: the steps that may be read, preferred first.
    """

    folder: pathlib.Path
    read: object
    steps: tuple[int, ...] = STEPS[::-1]


@pytest.fixture(scope="module")
def readers(make_run, tmp_path_factory):
    """Every function that reads a checkpoint, with a folder to read."""
    folder, config = make_run(step=STEPS[0], layers=1)
    shutil.rmtree(folder / "checkpoints")
    section = dataclasses.replace(config.checkpoint, best_metric="auc")
    checkpoints = checkpoints_lib.Checkpoints(folder / "checkpoints", section)
    for step in STEPS:
        checkpoints.save(make_state(config, step), {"position": step}, {"auc": 0.5})
    checkpoints.close()
    model = make_config(recipe="finetune", layers=1)
    outputs = OutputsSection(task="t", kind="classification", head="sequence", labels=("a", "b"))
    model = dataclasses.replace(model, outputs=outputs)
    finetuned = tmp_path_factory.mktemp("finetuned") / "seed-0"
    task = types.SimpleNamespace(name="t", outputs=outputs)
    tokenizer = load_tokenizer(config.tokenizer, folder / "data")
    save_model(Workdir(finetuned), model, task, tokenizer, random_params(model, seed=4), 4, 0)

    newest = make_state(config, 4)

    def resume(path):
        checkpoints = checkpoints_lib.Checkpoints(path / "checkpoints", section)
        try:
            found, position = checkpoints.restore(place(newest))
            assert checkpoints.is_best({"auc": 0.6})
            assert not checkpoints.is_best({"auc": 0.5})
        finally:
            checkpoints.close()
        assert position == {"position": int(found.step)}
        return found.params, found.opt_state

    def networks_of(found):
        return {name: network.parameters for name, network in found.items()}

    def with_moments(path):
        _, moments = sources.read_moments(Workdir(path), config)
        return [networks_of(part) for part in moments]

    return {
        "resume": Reader(folder, resume),
        "init_from": Reader(folder, lambda p: networks_of(sources.read_source(str(p)).networks)),
        "export with moments": Reader(folder, with_moments),
        "predict and teacher": Reader(finetuned, lambda p: read_finetuned(str(p))[1], (4,)),
    }


def as_bytes(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def read_or_refuse(reader: Reader, folder: pathlib.Path) -> list[bytes] | str:
    """Return the values that are read, or the error message."""
    with warnings.catch_warnings(action="error"):
        try:
            return as_bytes(reader.read(folder))
        except UserError as error:
            return str(error)


def flip(file: pathlib.Path, rng: random.Random) -> str:
    content = bytearray(file.read_bytes())
    where, bit = rng.randrange(len(content)), rng.randrange(8)
    content[where] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {where} of {file.name}"


def test_no_flipped_bit_is_read_as_a_value(readers, tmp_path, caplog):
    """Flips alternate between the largest file and a random one."""
    rng = random.Random(FLIPS)
    counts = collections.Counter()
    for name, reader in readers.items():
        copy = pathlib.Path(shutil.copytree(reader.folder, tmp_path / "whole"))
        good = {}
        for step in reader.steps:
            good[step] = as_bytes(reader.read(copy))
            shutil.rmtree(next(copy.rglob(f"checkpoints/{step}")))
        shutil.rmtree(copy)
        for number in range(FLIPS // len(readers)):
            copy = pathlib.Path(shutil.copytree(reader.folder, tmp_path / "flipped"))
            newest = next(copy.rglob("checkpoints/4"))
            files = sorted(file for file in newest.rglob("*") if file.is_file())
            if number % 2 == 0:
                files = [max(files, key=lambda file: file.stat().st_size)]
            what = f"{name}: {flip(rng.choice(files), rng)}"
            caplog.clear()
            found = read_or_refuse(reader, copy)
            if isinstance(found, str):
                assert found.count("\n") == 0, what
                assert len(found) < 600, what
                assert str(newest) in found or "(step 4: " in found, f"{what}: {found}"
                kind = "refused"
            else:
                assert found in good.values(), f"{what}: wrong values"
                kind = "right" if found == good[4] else "the one before"
            if kind == "the one before":
                assert str(newest) in caplog.text, what
            counts[kind] += 1
            shutil.rmtree(copy)
    print(f"{FLIPS} flips, {len(readers)} readers: {dict(counts)}, 0 silently wrong")
    assert min(counts[kind] for kind in ("the one before", "refused")) > 0, counts


def test_a_refusal_is_one_line(readers, tmp_path):
    """Run in a subprocess, to check that the interpreter prints nothing else on exit."""
    copy = pathlib.Path(shutil.copytree(readers["init_from"].folder, tmp_path / "run"))
    for file in (copy / "checkpoints" / "4" / "params").glob("ocdbt.process_0/d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    command = ["-m", "convbert_jax.main", "--mode=export", "--step=4", f"--workdir={copy}"]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert str(copy / "checkpoints" / "4") in line
