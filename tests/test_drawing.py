"""Pictures: what is written, and that a notebook goes on to show its own."""

import matplotlib

from convbert_jax import drawing
from tests.pictures import shows_something


def test_a_picture_leaves_matplotlib_as_it_was(tmp_path):
    """Above all the backend: with another one a notebook shows nothing any more."""
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
