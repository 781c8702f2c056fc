"""Pictures: written files, and no side effects on a notebook's figures."""

import matplotlib

from convbert_jax import drawing
from tests.pictures import shows_something


def test_a_picture_leaves_matplotlib_as_it_was(tmp_path):
    """Another backend would stop a notebook from showing its figures."""
    before = matplotlib.get_backend()
    matplotlib.use("svg")
    settings = dict(matplotlib.rcParams)
    try:
        with drawing.open_figure(tmp_path / "picture.png", (3, 2), ["\u05e9"]) as figure:
            figure.subplots().plot([0, 1], [1, 0])
        assert dict(matplotlib.rcParams) == settings
    finally:
        matplotlib.use(before)
    assert shows_something(tmp_path / "picture.png")


def test_dollars_are_no_formula(tmp_path):
    """Two dollar signs would start a formula, which drops spaces or fails."""
    for name, text in (("two", "$5 or $6"), ("broken", r"$\frac$")):
        with drawing.open_figure(tmp_path / name, (3, 2), [text]) as figure:
            title = figure.suptitle(text)
            figure.subplots().set_yticks([0], [text])
        assert not title.get_parse_math()
        assert shows_something(tmp_path / name)
