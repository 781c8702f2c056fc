"""What files of others claim, checked before it is believed: sizes, contents, numbers.

A file of weights may be cut off, flipped, or made to hang who reads it. Nothing is allocated or
counted through on the word of a file that its own size does not bear out.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.files import parse_json
from convbert_jax.interop.networks import ConversionError

_LARGEST_JSON = 1 << 25  # bytes; the largest tokenizer.json of a BERT has 5 million
LARGEST = 1 << 20  # of any size of a model; a larger one is a fault in the file
LEAST_PARAMETERS = 16  # of a layer, in every family: what bounds the layers by the tensors


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of somebody else's.

    Raises:
      ConversionError: it is absent, too large, or none.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConversionError(f"{path} is not a plain file; copy it again.", path=path)
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise ConversionError(
                f"{path} has {size:,} bytes, too many for what it should be.", path=path
            )
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ConversionError(f"{path} cannot be read ({error.strerror}).", path=path) from None
    except ValueError as error:
        raise ConversionError(f"{path} is damaged ({error}); copy it again.", path=path) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConversionError(f"{path} is damaged (it holds a {kind}, not an object).", path=path)
    return content


def check_memory(size: int, path: Path) -> None:
    """Refuses weights that no array of this machine could hold.

    Args:
      size: of all arrays, bytes.

    Raises:
      ConversionError: they are larger than its memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ConversionError(
            f"{path} claims {size / 2**30:,.0f} GiB of weights, more than this machine's memory of "
            f"{memory / 2**30:,.0f}; it is damaged, or for a larger machine.",
            path=path,
        )


def check_finite(arrays: Mapping[str, np.ndarray], place: str) -> None:
    """Refuses numbers that are none.

    Args:
      place: where they are from, as the beginning of a sentence.

    Raises:
      ConversionError: NaN or infinity.
    """
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        raise ConversionError(
            f"{place} has NaN or infinity in {len(wrong)} of {len(arrays)} arrays, first "
            f"{wrong[0]}; whoever wrote it had diverged or the file is damaged, take another one.",
            field=wrong[0],
        )


def shown(value: Any) -> str:
    """A value of a file for a sentence, not longer than one."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def first_line(error: Exception) -> str:
    """The first line of a library's error message, without its period; at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
