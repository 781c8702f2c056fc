"""Successive mistakes of a new user in one workdir; the fix in each error message works."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from tests import compiling
from tests.end_to_end.test_command_line import REPOSITORY, SMALL, TINY, refused, run, text_source
from tests.running import needs_libtpu

__all__ = ["text_source"]  # fixture


def first_error(result) -> str:
    return next(line for line in result.stderr.splitlines() if line.startswith("error:"))


def named_flag(result, field: str) -> str:
    """Return the flag that the error suggests, verbatim."""
    return re.search(rf"--config\.{field}=[^\s;,]*[^\s;,.]", first_error(result))[0]


def interrupt_when(line: str, *arguments) -> str:
    """Start the command, send Ctrl-C when `line` is logged, and return the output."""
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.main", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": compiling.CHEAPLY},
        stderr=subprocess.PIPE,
        text=True,
        # As in a terminal. Background processes of a shell ignore SIGINT, and so would the tests.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    seen = []
    for printed in process.stderr:
        seen.append(printed)
        if line in printed:
            process.send_signal(signal.SIGINT)
            break
    rest = process.communicate(timeout=300)[1]
    return "".join(seen) + rest


@pytest.mark.slow
def test_five_mistakes_in_a_row_cost_no_folder(tmp_path, text_source):
    flags = [TINY, *SMALL, f"--workdir={tmp_path}/run", "--config.train.steps=4"]
    text = text_source.removeprefix("--config.data.source=text:")
    source = [text_source]

    # a wrong glob
    refused(run(*flags, f"--config.data.source=text:{text}s"), "No file matches")
    # the wrong kind of source
    wrong = run(*flags, f"--config.data.source=parquet:{text}")
    refused(wrong, "text.txt")
    # a vocabulary too large for the text, then the suggested size
    large = run(*flags, *source, "--config.tokenizer.vocab_size=200k")
    refused(large, "--config.tokenizer.vocab_size=")
    flags.append(named_flag(large, "tokenizer.vocab_size"))
    # Ctrl-C during preparation
    printed = interrupt_when("Training a sentencepiece", *flags, *source)
    assert "error: interrupted" in printed
    # the wrong kind of vocabulary, once shards exist
    kind = ("--config.tokenizer.kind=wordpiece", "--config.tokenizer.vocab_size=300")
    prepared = run("--mode=prepare", *flags, *source, *kind)
    assert prepared.returncode == 0, prepared.stderr
    shards = {p: p.read_bytes() for p in (tmp_path / "run" / "data").glob("*.array_record")}
    assert shards
    other = run(*flags, *source)
    refused(other, "tokenizer.kind", f"{tmp_path}/run/data")
    flags.append(named_flag(other, "data.directory"))
    # another batch size
    done = run(*flags, *source, "--config.train.batch_size=4")
    assert done.returncode == 0, done.stderr
    assert all(path.read_bytes() == content for path, content in shards.items())


@pytest.mark.slow
def test_after_a_checkpoint_another_batch_size_starts_elsewhere_with_the_same_shards(
    tmp_path, text_source
):
    flags = [TINY, *SMALL, text_source, "--config.train.steps=1k"]
    printed = interrupt_when("First step", *flags, f"--workdir={tmp_path}/run")
    assert "Traceback" not in printed
    other = [*flags, "--config.train.batch_size=4", "--config.train.steps=2"]
    result = run(*other, f"--workdir={tmp_path}/run")
    refused(result, "config.train.batch_size was 8, now 4")
    elsewhere = run(*other, f"--workdir={tmp_path}/new", named_flag(result, "data.directory"))
    assert elsewhere.returncode == 0, elsewhere.stderr
    assert "Training a" not in elsewhere.stderr  # vocabulary and shards were reused
    assert not (tmp_path / "new" / "data").exists()
    again = run("--mode=train", f"--workdir={tmp_path}/run", "--config.train.steps=4")
    assert "Resuming from the checkpoint" in again.stderr or "Nothing to do" in again.stderr


@pytest.mark.slow
def test_weights_bring_their_vocabulary_and_sizes(tmp_path, text_source):
    first = (TINY, *SMALL, text_source, "--config.train.steps=2")
    done = run(*first, f"--workdir={tmp_path}/first")
    assert done.returncode == 0, done.stderr
    second = [
        TINY, text_source, f"--config.init_from={tmp_path}/first", f"--workdir={tmp_path}/second",
        "--config.train.steps=2", "--config.data.length=32", "--config.train.batch_size=8",
        "--config.train.eval_rows=16", "--config.data.workers=1",
        "--config.data.heldout_fraction=0.1",
    ]  # fmt: skip
    wrong = run(*second, "--config.model.layers=3")
    refused(wrong, "config.model.layers=1")
    result = run(*second)
    assert result.returncode == 0, result.stderr
    assert f"{tmp_path}/first: --config." in result.stderr
    assert "Starting from given weights" in result.stderr
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["model"]["layers"] == 1
    assert config["tokenizer"]["vocab_size"] == 200
    again = run(*second)
    assert "Nothing to do" in again.stderr, again.stderr
    assert again.returncode == 0


@pytest.mark.slow
def test_fine_tuning_mistakes_bind_nothing(tmp_path):
    """A wrong folder, column or weights: each is refused and does not affect the next command."""
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnop"]
    (tmp_path / "vocab.txt").write_text("\n".join(entries))
    (tmp_path / "train.csv").write_text(
        "stars,review\n" + "".join(f"good,a {c}\nbad,b {c}\n" for c in "abcdefghijklmnop")
    )
    small = ("layers=1", "hidden_size=16", "ffn_size=16", "embedding_size=16", "heads=2")
    flags = [
        "--config=configs/text.py:own", f"--workdir={tmp_path}/run",
        f"--config.task.folder={tmp_path}", "--config.task.train=train.csv",
        "--config.task.texts=review", "--config.task.label=stars",
        f"--config.tokenizer.path={tmp_path}/vocab.txt", "--config.model.positions=16",
        *(f"--config.model.{field}" for field in small),
        "--config.finetune.length=8", "--config.finetune.buckets=", "--config.finetune.seeds=1",
        "--config.finetune.epochs=1", "--config.finetune.save_models=false",
    ]  # fmt: skip
    refused(run(*flags, f"--config.task.folder={tmp_path}/nowhere"), "nowhere/train.csv")
    refused(run(*flags, "--config.task.label=star"), "star")
    refused(run(*flags, f"--config.init_from={tmp_path}/nowhere"), f"{tmp_path}/nowhere")
    refused(run(*flags, f"--config.tokenizer.path={tmp_path}/v.txt"), "No such file")
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "results.jsonl").is_file()


@needs_libtpu
def test_an_absent_tpu_is_not_talked_of(tmp_path):
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_", "JAX_", "XLA_"))}
    command = [sys.executable, "-m", "convbert_jax.main", TINY, f"--workdir={tmp_path}/run"]
    command.append(f"--config.data.source=text:{tmp_path}/*.txt")

    def start(**environment):
        return subprocess.run(
            command, cwd=REPOSITORY, env=ours | environment, capture_output=True, text=True,
            timeout=240, check=False,
        ).stderr.splitlines()  # fmt: skip

    lines = start()
    assert " on 1 x cpu" in lines[0], lines
    assert "No file matches" in lines[-1]
    assert all(re.match(r"\d\d:\d\d:\d\d |error: ", line) for line in lines), lines
    told = [line for line in start(JAX_PLATFORMS="tpu") if line.startswith("error:")]
    assert len(told) == 1
    assert "Unable to initialize backend 'tpu'" in told[0]
