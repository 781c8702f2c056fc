"""Fine-tuning commands: a killed sweep, predictions, export, distillation."""

import concurrent.futures
import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from convbert_jax.finetuning import run_files
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.workdir import Workdir
from tests.end_to_end.test_command_line import REPOSITORY, refused, run

WORDS = ["river", "stone", "light", "under", "over", "small", "great"]
WORDS += ["house", "tree", "water", "fire", "sun", "moon", "star"]


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """Flags of a custom task with a vocabulary and without weights, so it trains from scratch."""
    folder = tmp_path_factory.mktemp("own")
    lines = ["stars,review"]
    for number in range(240):
        good = number % 2
        rest = " ".join(WORDS[(number * 7 + i) % 14] for i in range(2 + number % 9))
        lines.append(f"{'good' if good else 'bad'},{'sun' if good else 'moon'} {rest}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    (folder / "test.csv").write_text("review\nsun river stone\nmoon light\n")
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    letters = sorted({letter for word in WORDS for letter in word})
    entries += [*letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(entries) + "\n")
    return [
        "--config=configs/text.py:own",
        f"--config.task.folder={folder}",
        "--config.task.train=train.csv",
        "--config.task.test=test.csv",
        "--config.task.texts=review",
        "--config.task.label=stars",
        f"--config.tokenizer.path={folder}/vocab.txt",
        "--config.tokenizer.kind=wordpiece",
        f"--config.tokenizer.vocab_size={len(entries)}",
        *(f"--config.model.{field}" for field in ("layers=2", "hidden_size=32", "ffn_size=64")),
        *(f"--config.model.{field}" for field in ("embedding_size=32", "heads=4", "positions=32")),
        "--config.finetune.length=16",
        "--config.finetune.buckets=",
        "--config.finetune.learning_rates=1e-2",
        "--config.finetune.epochs=5",
        "--config.finetune.seeds=3",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mode=predict",), "--mode=predict needs --workdir=MODEL"),
        (("--config=configs/glue.py:colla",), "did you mean 'cola'"),
        (("--config=configs/glue.py:cola,papr",), "config.variant="),
        (("--config=configs/glue.py:cola", "--config.finetune.seeds=0"), "at least 1"),
        (("--config=configs/glue.py:cola", "--config.finetune.head=sequenc"), "'sequence'"),
    ],
)
def test_wrong_flags(arguments, says):
    refused(run(*arguments), says)


@pytest.mark.slow
def test_a_task_of_ones_own_from_files_to_a_model_for_everyone(own, tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "convbert_jax.main", *own, f"--workdir={folder}"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE)
    run_files = folder / "results.jsonl"
    limit = time.monotonic() + 300
    while not run_files.exists() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = run_files.read_text().splitlines()
    assert first, "no run finished in time"

    done = run(f"--workdir={folder}")  # the config is in the workdir
    assert done.returncode == 0, done.stderr
    assert "of 3 seeds are finished" in done.stderr
    assert "this run, median" in done.stdout
    lines = run_files.read_text().splitlines()
    assert lines[: len(first)] == first
    assert [json.loads(line)["seed"] for line in lines] == [0, 1, 2]
    other = run(*own, f"--workdir={folder}", "--config.finetune.batch_size=8")
    refused(other, "config.finetune.batch_size was 32, now 8")

    model = folder / "own" / "seed-1"
    text = tmp_path / "text.txt"
    text.write_text("sun river\nmoon sun\n" * 3)
    predicted = run(
        "--mode=predict", f"--workdir={model}", f"--input={text}", f"--output={tmp_path}/p.jsonl"
    )
    assert predicted.returncode == 0, predicted.stderr
    answers = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert answers[0].keys() == {"id", "texts", "prediction", "probabilities"}
    assert {answer["prediction"] for answer in answers} <= {"good", "bad"}
    assert [answer.pop("id") for answer in answers] == list(range(6))
    assert answers == answers[:2] * 3

    exported = run("--mode=export", f"--workdir={model}", f"--output={tmp_path}/hf")
    assert exported.returncode == 0, exported.stderr
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["label2id"] == {"bad": 0, "good": 1}
    again = run(
        "--mode=predict", f"--workdir={tmp_path}/hf", f"--input={text}",
        f"--output={tmp_path}/hf.jsonl",
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
    for line, answer in zip((tmp_path / "hf.jsonl").read_text().splitlines(), answers, strict=True):
        assert json.loads(line)["probabilities"] == pytest.approx(answer["probabilities"], abs=1e-5)

    student = run(
        *own, f"--workdir={tmp_path}/student", f"--config.finetune.distill_from={tmp_path}/hf",
        "--config.finetune.seeds=1",
    )  # fmt: skip
    assert student.returncode == 0, student.stderr
    assert f"teacher {tmp_path}/hf" in student.stderr


@pytest.mark.slow
def test_two_processes_fine_tune_what_one_does(own, tmp_path):
    """Results, models and predictions are written once and equal those of one process.

    Parameters are sharded over the processes, and both seeds train together.
    """
    flags = [*own, "--config.model.hidden_size=128", "--config.model.ffn_size=256"]
    flags += ["--config.finetune.seeds=2", "--config.finetune.epochs=1"]
    flags += ["--config.finetune.vectorize_seeds=true", "--config.finetune.learning_rates=1e-3"]
    alone = run(*flags, f"--workdir={tmp_path}/alone")
    assert alone.returncode == 0, alone.stderr
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = (f"--workdir={tmp_path}/both", f"--coordinator=localhost:{port}", "--processes=2")
    shared += ("--config.mesh.data=1", "--config.mesh.fsdp=2")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = [pool.submit(run, *flags, *shared, f"--process={index}") for index in (0, 1)]
        ends = [process.result() for process in both]
    for end in ends:
        assert end.returncode == 0, end.stderr
    assert "Runs, models and predictions" in ends[0].stdout
    one, two = (run_files.read_results(Workdir(tmp_path / name)) for name in ("alone", "both"))
    assert [r.seed for r in one] == [r.seed for r in two] == [0, 1]
    for mine, other in zip(one, two, strict=True):
        assert other.loss == pytest.approx(mine.loss, abs=1e-5)
        assert other.scores == mine.scores
    for seed in (0, 1):
        first, second = (
            load_arrays(tmp_path / name / "own" / f"seed-{seed}" / "checkpoints")[1]
            for name in ("alone", "both")
        )
        assert first.keys() == second.keys()
        for name in first:
            np.testing.assert_allclose(second[name], first[name], atol=1e-5, err_msg=name)
    assert not (tmp_path / "both" / "unfinished").exists()
