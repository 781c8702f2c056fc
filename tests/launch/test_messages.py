"""launch/messages.py: which strings of a file are messages."""

import pathlib
import runpy

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "messages.py"
SOURCE = '''"""A docstring of several words."""
from typing import Any

def f(x: "int | str | float | None") -> "int | str | float | None":
    """Another docstring of several words."""
    if x:
        raise ValueError(f"x={x!r} is not allowed: "
                         "use a smaller number.")
    logging.warning("%d of the rows were skipped", x)
    return "short text"
'''


def test_errors_and_log_lines_are_found_docstrings_and_annotations_are_not(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    assert runpy.run_path(str(SCRIPT))["messages"](path) == [
        (7, "ValueError", "x={...} is not allowed: use a smaller number."),
        (9, "logging.warning", "%d of the rows were skipped"),
    ]
