"""Console output of a run: whole lines, with and without a progress bar."""

import io
import logging
import subprocess
import sys

import tqdm

from convbert_jax import console


def shown(stream: str) -> list[str]:
    """Returns the lines of a terminal: the last text written, from the left."""
    lines = []
    for line in stream.split("\n"):
        cells = ""
        for part in line.split("\r"):
            cells = part + cells[len(part) :]
        lines.append(cells.rstrip())
    return lines


def test_a_line_stands_above_the_bar(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    handler = console.make_handler()
    record = logging.makeLogRecord(
        {"msg": "step %d", "args": (7,), "levelno": logging.INFO, "pathname": console.__file__}
    )
    with tqdm.tqdm(total=10, desc="training", ncols=60, file=screen) as bar:
        bar.update(3)
        bar.refresh()
        handler.handle(record)
        above, below = shown(screen.getvalue())
    assert above.endswith(" step 7")
    assert "training" not in above
    assert below.startswith("training:  30%")


def test_an_error_is_one_line():
    code = "from convbert_jax import console; console.fail('a\\nb.', code=3)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (3, "error: a b.\n")


def test_setting_up_twice_writes_each_line_once(capsys):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        console.set_up_logging()
        console.set_up_logging()
        logging.getLogger("somebody").warning("look")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert capsys.readouterr().err.count("look") == 1
