"""Send 200 signals while commands read a checkpoint; each must stop the command.

To repeat: `python -m pytest -m slow tests/recipes/test_interrupted_reads.py`.
"""

import math
import shutil
import signal
import subprocess
import sys
import time

import pytest
from absl.testing import flagsaver

import convbert_jax
from convbert_jax import command_line, console, interrupts, main
from convbert_jax.config import to_dict
from convbert_jax.storage import write_json
from convbert_jax.training import checkpoints
from convbert_jax.workdir import Workdir, list_steps
from tests.conftest import REPOSITORY
from tests.launch.hearing import hear

SIGNALS = 200
ANSWERS = ((signal.SIGINT, 130), (signal.SIGTERM, interrupts.TRY_AGAIN))
# command -> flags; {pretrained}, {translated} and {finetuned} are run folders, {new} is an empty
# folder, {CONFIG} a config file from `configs`
COMMANDS = {
    "resume": "--workdir={pretrained} --config.train.steps=6",
    "eval": "--mode=eval --workdir={pretrained}",
    "export": "--mode=export --workdir={pretrained} --output={new}",
    "export with moments": "--mode=export --format=tensorflow1 --workdir={pretrained} "
    "--output={new}",
    "inspect": "--mode=inspect --workdir={pretrained} --input={text}",
    "fine-tune": "--config={finetune} --workdir={new}",
    "fine-tune with a teacher": "--config={finetune} --workdir={new} "
    "--config.finetune.distill_from={finetuned}",
    "predict": "--mode=predict --workdir={finetuned} --input={text} --output={new}.jsonl",
    "start from weights": "--config={pretrain} --workdir={new} --config.init_from={pretrained}",
    "distill": "--config={pretrain} --workdir={new} --config.distillation.teacher={pretrained} "
    "--config.distillation.hidden_weight=1",
    "score the mean": "--mode=eval --workdir={translated} --config.decoding.average=3",
    "translate": "--mode=predict --workdir={translated} --input={text} --output={new}.jsonl",
    "load": "",
}


@pytest.fixture(scope="module")
def folders(
    pretrained, translated, finetuned, pretraining_config, finetuning_config, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("interrupted")
    (folder / "text.txt").write_text("good text\nbad text\n")
    for name, config in (("pretrain", pretraining_config), ("finetune", finetuning_config)):
        write_json(folder / f"{name}.json", to_dict(config))
    return {
        "pretrained": pretrained.folder,
        "translated": translated.folder,
        "finetuned": Workdir(finetuned.folder).models()[0],
        "text": folder / "text.txt",
        "pretrain": folder / "pretrain.json",
        "finetune": folder / "finetune.json",
    }


class Attack:
    """Sends a signal at a call or return of the main thread during the first read.

    Attributes:
      calls: number of calls and returns in the first read.
      moment: index of the call at which the signal is sent; None sends it at the end of the read.
    """

    def __init__(self, read, number: int, moment: int | None):
        self._read, self._number, self.moment = read, number, moment
        self.calls: int | None = None

    def __call__(self, *arguments):
        if self.calls is not None:
            return self._read(*arguments)
        self.calls = 0

        def hook(*_):
            self.calls += 1
            if self.calls == self.moment:
                sys.setprofile(None)
                signal.raise_signal(self._number)

        sys.setprofile(hook)
        try:
            return self._read(*arguments)
        finally:
            sys.setprofile(None)
            if self.moment is None:
                signal.raise_signal(self._number)


def run(command: str, places: dict) -> int | str | None:
    """Return the exit code of a command, or None if it finishes."""
    try:
        with flagsaver.flagsaver():
            if command == "load":
                with interrupts.handled():
                    convbert_jax.load(places["pretrained"])
            else:
                words = COMMANDS[command].format(**places).split()
                main.main(command_line.read(["main.py", *words]))
    except SystemExit as error:
        return error.code
    except KeyboardInterrupt as error:
        return interrupts.exit_code(getattr(error, "by", "SIGINT"))
    return None


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_no_signal_is_lost(folders, command, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(console, "set_up_logging", lambda: None)
    # set_up_logging would affect other tests; _exit_without_saving would end them.
    monkeypatch.setattr(interrupts, "_exit_without_saving", lambda number: None)
    read, calls, lost = checkpoints._read, None, []
    for attempt in range(math.ceil(SIGNALS / len(COMMANDS)) + 1):
        places = folders | {"new": tmp_path / f"new-{attempt}"}
        if command == "resume":
            places["pretrained"] = shutil.copytree(folders["pretrained"], tmp_path / f"{attempt}")
        moment = calls and 1 + calls * (attempt - 1) // math.ceil(SIGNALS / len(COMMANDS))
        number, code = ANSWERS[attempt % 2]
        attack = Attack(read, number, moment)
        monkeypatch.setattr(checkpoints, "_read", attack)
        found = run(command, places)
        calls = calls or attack.calls
        if found != code:
            lost.append((moment, number.name, found))
        kept = list_steps(Workdir(places["pretrained"]).checkpoints)
        assert kept[:1] == [4], "an intact checkpoint was renamed"
    assert calls, "nothing was read"
    assert lost == []
    assert "damaged" not in caplog.text


PROCESS = """
import sys
from convbert_jax import main
from convbert_jax.training import checkpoints
read = checkpoints._read

def tell(*arguments):
    print("reading", flush=True)
    return read(*arguments)

checkpoints._read = tell
sys.argv[1:] = {words}
main.start()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "seconds"), [(*ANSWERS[0], 0.0), (*ANSWERS[1], 0.1)])
def test_a_process_exits_with_the_code_of_its_signal(folders, tmp_path, number, code, seconds):
    words = COMMANDS["export"].format(**folders, new=tmp_path / "new").split()
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS.format(words=words)],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=hear,
    )  # fmt: skip
    assert process.stdout.readline() == "reading\n"
    time.sleep(seconds)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == code, said
    assert not (tmp_path / "new").exists()
