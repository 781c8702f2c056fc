"""Pictures: matplotlib without a window, fonts for any script, files replaced as a whole."""

import contextlib
import functools
import logging as python_logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from absl import logging
from etils import epath

from convbert_jax import files

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextlib.contextmanager
def open_figure(
    picture: epath.PathLike, size: tuple[float, float], texts: Iterable[str] = (), *, dpi: int = 120
) -> Iterator["Figure"]:
    """A figure to draw on, written as PNG at the end.

    Backend and settings of matplotlib stay as they are: in a notebook pictures go on to be shown.

    Args:
      size: width and height in inches.
      texts: what is written on it, in any script that an installed font has; a $ is a $.
    """
    import matplotlib
    from matplotlib.figure import Figure

    # Of a family with one weight it would say at every picture that this is not the normal one.
    python_logging.getLogger("matplotlib.font_manager").setLevel(python_logging.ERROR)
    characters = frozenset(character for text in texts for character in text if character > "\x7f")
    settings = {"font.family": list(_find_fonts(characters)), "text.parse_math": False}
    with matplotlib.rc_context(settings):
        figure = Figure(size, layout="constrained")
        yield figure
        with files.replacing(files.to_path(picture)) as file:
            figure.savefig(file, format="png", dpi=dpi)


@functools.cache
def _find_fonts(characters: frozenset[str]) -> tuple[str, ...]:
    """Families that have `characters` between them, the usual one first; logs what none has.

    The last one, if this matplotlib brings it, draws a box for every character there is.
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
            "No installed font has %s: pictures show boxes in their place; install one, for "
            "example Noto Sans CJK.",
            ", ".join(sorted(missing)[:5]) + (", …" if len(missing) > 5 else ""),
        )
        families += last_resort
    return tuple(families)
