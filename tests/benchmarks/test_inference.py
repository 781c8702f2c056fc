"""The parts of benchmarks/speed/inference.py on a tiny model, and what it says of a machine."""

import os
import subprocess
import sys

import pytest

from benchmarks import timing
from benchmarks.speed import inference
from benchmarks.speed.inference_models import Models, prepare
from tests.conftest import REPOSITORY
from tests.finetuning.conftest import vocabulary  # noqa: F401

TEXTS = ["the sun", "a small moon over the tree", "fire water", "star"] * 3
SMALL = {
    "model.layers": 1,
    "model.hidden_size": 16,
    "model.embedding_size": 16,
    "model.heads": 2,
    "model.ffn_size": 32,
    "tokenizer.kind": "wordpiece",
    "tokenizer.vocab_size": 60,
    "train.compile_cache": "",
}


@pytest.mark.parity
@pytest.mark.slow
def test_all_parts_on_a_tiny_model(tmp_path, vocabulary):  # noqa: F811
    for package in ("torch", "transformers", "onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    prepare(tmp_path, "tiny", **SMALL, **{"tokenizer.path": str(vocabulary.path)})
    models = Models(tmp_path)
    (line,) = inference.compare_forward(models, [(2, 8)], rounds=2)
    assert line.startswith("forward 2x8: ours ")
    assert "ONNX Runtime / ours " in line
    about, line = inference.compare_texts(models, TEXTS, rounds=1, batches=(1, 2))
    assert about.startswith("12 texts of ")
    assert " programs so far" in about
    assert "/s" in line
    assert "pipeline (batches of " in line
    # Others than the very weights are no comparison.
    models.torch.embeddings.word_embeddings.weight.data.mul_(3.0)
    with pytest.raises(SystemExit, match="the pipeline differs by"):
        list(inference.compare_texts(models, TEXTS, rounds=1, batches=(1,)))
    (line,) = inference.measure_startup(tmp_path, rounds=1)
    assert line.startswith("start to first vector: with an empty compile cache ")


def test_threads_are_cores_that_a_process_may_run():
    program = (
        "import os\nfrom benchmarks import timing\ntiming.take_threads(1)\n"
        "print(len(os.sched_getaffinity(0)), timing.describe_processor())\n"
        "timing.take_threads(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY, env={**os.environ}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("1 ")
    assert done.stdout.endswith("; 1 thread\n")
    assert done.stderr == "--threads=2, but this process may use only 1 cores.\n"


def test_ratios_are_of_turns_that_follow_each_other():
    assert timing.describe_ratios([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == "2.00 (1.00 to 3.00)"
