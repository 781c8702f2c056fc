"""Figures by matplotlib without a display: PNG files, and SVG inside an HTML page."""

import contextlib
import functools
import io
import logging as python_logging
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from absl import logging
from etils import epath

from convbert_jax import storage

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name of a CSS variable -> its color in PNG files and in the light mode of a page.
COLORS = {
    "ink": "#1c2128",
    "faint": "#5b6570",
    "line": "#d8dde3",
    "first": "#1f6fb2",
    "second": "#c2570c",
    "third": "#8250df",
}
CURVES = (COLORS["first"], COLORS["second"], COLORS["third"])


@contextlib.contextmanager
def open_figure(
    picture: epath.PathLike, size: tuple[float, float], texts: Iterable[str] = (), *, dpi: int = 120
) -> Iterator["Figure"]:
    """Yields a figure and writes it as PNG at the end of the block.

    matplotlib's backend and settings do not change, so a notebook still shows its own figures.

    Args:
      size: width and height in inches.
      texts: all texts of the figure from outside of the package; fonts are chosen by their scripts.
    """
    with _settings(texts):
        figure = _make_figure(size)
        yield figure
        with storage.replacing(storage.to_path(picture)) as file:
            figure.savefig(file, format="png", dpi=dpi)


def to_svg(draw: Callable[["Axes"], None], size: tuple[float, float], title: str) -> "Markup":
    """Returns an <svg> element whose `COLORS` are CSS variables of the page around it.

    Args:
      draw: draws on the axes; must not draw texts from outside of the package.
      size: width and height in inches.
      title: describes the figure to readers who cannot see it.
    """
    from markupsafe import Markup, escape

    # Salted ids are hashes of the definitions, so figures on one page can share ids.
    options = {
        "svg.fonttype": "none",
        "svg.hashsalt": "convbert_jax",
        "path.simplify_threshold": 0.5,  # pixels; keeps pages with long curves small
    }
    with _settings(**options):
        figure, file = _make_figure(size), io.StringIO()
        draw(figure.subplots())
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = re.sub(r' id="[a-zA-Z0-9.]+_[0-9]+"', "", svg[svg.index("<svg") :])
    for name, color in COLORS.items():
        svg = svg.replace(color, f"var(--{name})")
    return Markup(svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1))


@contextlib.contextmanager
def _settings(texts: Iterable[str] = (), **others: object) -> Iterator[None]:
    import matplotlib

    # Silences a warning for each font family that has only one weight.
    python_logging.getLogger("matplotlib.font_manager").setLevel(python_logging.ERROR)
    characters = frozenset(character for text in texts for character in text if character > "\x7f")
    settings = {"font.family": list(_find_fonts(characters)), "text.parse_math": False}
    with matplotlib.rc_context(settings | others):
        yield


def _make_figure(size: tuple[float, float]) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(size, layout="constrained")


@functools.cache
def _find_fonts(characters: frozenset[str]) -> tuple[str, ...]:
    """Returns font families that cover `characters`, the default family first.

    Logs characters that no installed font has. The last family, if this matplotlib includes it,
    draws a box for them.
    """
    from matplotlib import font_manager

    families, missing = ["DejaVu Sans"], set(characters)
    fonts = font_manager.fontManager.ttflist
    last_resort = {font.name for font in fonts if font.name.startswith("Last Resort")}
    for font in sorted(
        fonts,
        key=lambda font: (font.name != families[0], font.style, font.weight != 400, font.name),
    ):
        if not missing:
            break
        if font.name in last_resort:
            continue
        found = {c for c in missing if ord(c) in font_manager.get_font(font.fname).get_charmap()}
        if found and font.name not in families:
            families.append(font.name)
        missing -= found
    if missing:
        logging.warning(
            "No installed font has the characters %s, so figures show boxes instead. Install a "
            "font that has them, for example Noto Sans CJK.",
            ", ".join(sorted(missing)[:5]) + (", …" if len(missing) > 5 else ""),
        )
        families += last_resort
    return tuple(families)
