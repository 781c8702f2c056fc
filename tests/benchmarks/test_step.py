"""benchmarks/step.py: which steps it compares, how it counts them, and its table."""

import dataclasses
import subprocess
import sys

import pytest

from benchmarks import step
from tests.conftest import REPOSITORY
from tests.running import needs_libtpu

TINY = ["--config.model.layers=1", "--config.tokenizer.vocab_size=200"]


def test_electra_is_the_same_config_with_attention_alone():
    ours = step.read_config("base", "64x512", {"model.scan_unroll": 2})
    theirs = step.read_config("electra-base", "64x512", {"model.scan_unroll": 2})
    assert (ours.train.batch_size, ours.data.length, ours.model.scan_unroll) == (64, 512, 2)
    assert (ours.model.mixer, theirs.model.mixer) == ("mixed", "attention")
    model = dataclasses.replace(theirs.model, mixer="mixed")
    assert dataclasses.replace(theirs, model=model) == ours
    # ... and has the sizes of ELECTRA's own config.
    published = step.read_config("electra:base", None, {})
    for name in ("layers", "hidden_size", "embedding_size", "heads", "ffn_size"):
        assert getattr(theirs.model, name) == getattr(published.model, name)


def test_shapes_of_a_size_have_equally_many_tokens():
    for shapes in step.SHAPES.values():
        sides = [shape.split("x") for shape in shapes]
        assert len({int(rows) * int(length) for rows, length in sides}) == 1
    assert step.default_shapes("electra-base") == step.default_shapes("base:paper")
    with pytest.raises(SystemExit, match="--shapes 128 is not rows x length; write it as 256x128"):
        step.read_config("base", "128", {})


def test_both_directions_of_the_bandwidth_assumption():
    cycles = step.Cycles(products=60e6, kernels=4e6, rest=30e6, pessimism=2.5)
    assert cycles.as_priced == 94e6
    assert cycles.at_full_bandwidth == 60e6 + 4e6 + 12e6
    assert cycles.at_compilers_bandwidth == 60e6 + 10e6 + 30e6


def test_a_row_of_the_table():
    groups = {"matrix products": 60e6, "Pallas kernels": 4e6, "everything else": 36e6}
    numbers = {
        "fits": True,
        "cycles": groups,
        "flops": 50e6 * 131_072,
        "memory": {"temporaries": 2**31},
        "compile_seconds": 12.4,
    }
    cells = step.describe(numbers, "tpu:v5e")
    assert len(cells) == len(step.COLUMNS) - 1
    # 819e9 bytes a second at 1.503 GHz are 545 a cycle, of which the compiler has 222.
    assert cells[:6] == ["60.0", "4.0", "36.0", "100.0", "78.7", "105.8"]
    assert cells[6:] == ["47.3% to 63.6%", "2.00", "12"]
    short = {"fits": False, "memory": {"needed": 20 * 2**30}, "compile_seconds": 9.0}
    cells = step.describe(short, "tpu:v5e")
    assert len(cells) == len(step.COLUMNS) - 1
    assert cells[-2:] == ["does not fit: 20.0", "9"]


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
def test_the_table_of_one_chip():
    program = [sys.executable, "-m", "benchmarks.step", "--configs", "tiny", "electra-tiny"]
    done = subprocess.run(
        [*program, "--shapes", "8x128", "--operations", "1", *TINY],
        cwd=REPOSITORY, capture_output=True, text=True, check=True,
    )  # fmt: skip
    title, header, _, ours, dearest, theirs, _ = done.stdout.splitlines()
    assert title == "million cycles of a step on one tpu:v5e, by the TPU compiler's model"
    assert ours.startswith("| tiny, 8x128 | ")
    assert theirs.startswith("| electra-tiny, 8x128 | ")
    assert header.count("|") == ours.count("|") == theirs.count("|")
    assert " x " in dearest
