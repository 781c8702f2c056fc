"""The commands export and import, and training from their results."""

import json

import pytest

from tests.end_to_end.test_command_line import SMALL, TINY, refused, run, text_source

__all__ = ["text_source"]  # fixture


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--mode=export",), "--mode=export needs --workdir"),
        (("--mode=export", "--source=x"), "--output"),
        (("--mode=import", TINY), "--source=WEIGHTS and --workdir=FOLDER"),
        (("--mode=import", "--source=x", "--workdir=y"), "--config is missing"),
        pytest.param(("--mode=export", "--workdir=/nowhere"), "/nowhere", marks=pytest.mark.slow),
        (("--mode=export", "--workdir=x", "--format=keras"), "format"),
        (("--mode=export", "--workdir=x", "--quantize=int8"), "--format=onnx"),
        (("--mode=train", TINY, "--push_to_hub=me/mine"), "--push_to_hub"),
        (("--mode=import", TINY, "--source=/nowhere", "--workdir=y"), "/nowhere"),
    ],
)
def test_wrong_flags(arguments, says):
    refused(run(*arguments), says)


@pytest.mark.slow
def test_a_trained_run_goes_everywhere(tmp_path, text_source):
    """Train with revisions, export, import, continue from the import, adapt from the folder."""
    flags = (TINY, *SMALL, text_source, "--config.generator.release_heads=no")
    steps = "--config.train.steps=4"
    folder = tmp_path / "run"
    every = "--config.checkpoint.huggingface_every=2"
    trained = run(*flags, steps, every, f"--workdir={folder}")
    assert trained.returncode == 0, trained.stderr
    revisions = sorted(path.name for path in (folder / "huggingface").iterdir())
    assert revisions == ["step-0", "step-2", "step-4"]
    assert (folder / "huggingface" / "step-0" / "generator" / "model.safetensors").is_file()
    before = (folder / "huggingface" / "step-4" / "model.safetensors").read_bytes()

    exported = run("--mode=export", f"--workdir={folder}")
    assert exported.returncode == 0, exported.stderr
    assert "discriminator: " in exported.stderr
    assert (folder / "huggingface" / "step-4" / "model.safetensors").read_bytes() == before
    official = run("--mode=export", f"--workdir={folder}", "--format=tensorflow1")
    assert official.returncode == 0, official.stderr

    imported = run(
        "--mode=import", *flags, steps, f"--source={folder}/huggingface/step-4",
        f"--workdir={tmp_path}/imported",
    )  # fmt: skip
    assert imported.returncode == 0, imported.stderr
    assert "Loaded " in imported.stderr
    vocabulary = f"--config.tokenizer.path={folder}/huggingface/step-4/spiece.model"
    config = json.loads((tmp_path / "imported" / "config.json").read_text())
    assert config["tokenizer"]["path"] in vocabulary
    positions = f"--config.model.positions={config['model']['positions']}"
    going_on = run(*flags, steps, vocabulary, positions, f"--workdir={tmp_path}/imported")
    assert going_on.returncode == 0, going_on.stderr
    assert "Resuming from the checkpoint of step 0" in going_on.stderr

    source = f"--config.init_from={folder}/tensorflow1/step-4"
    layout = ("--config.model.mask_convolution=no", "--config.data.layout=electra")
    adapted = run(*flags, steps, *layout, vocabulary, source, f"--workdir={tmp_path}/adapted")
    assert adapted.returncode == 0, adapted.stderr
    assert "Starting from given weights" in adapted.stderr
    assert "Initialized" not in adapted.stderr
    again = run(*flags, steps, *layout, vocabulary, source, f"--workdir={tmp_path}/adapted")
    assert "Nothing to do" in again.stderr
    taken = run(*flags, steps, source, f"--workdir={tmp_path}/other")
    assert taken.returncode == 0, taken.stderr
    assert f"--config.tokenizer.path={folder}/tensorflow1/step-4" in taken.stderr
