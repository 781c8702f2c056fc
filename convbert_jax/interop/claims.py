"""Validation of untrusted weight files: sizes, contents and numbers.

A weight file may be truncated, corrupted or malicious. Readers allocate memory and loop only as
far as the actual size of the file justifies.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.files import parse_json
from convbert_jax.interop.networks import ConversionError

_LARGEST_JSON = 1 << 25  # bytes; the largest tokenizer.json of a BERT has 5 million
LARGEST = 1 << 20  # largest accepted model dimension; a larger one means a damaged file
LEAST_PARAMETERS = 16  # tensors of a layer in every family; bounds the layers of a file


def read_json(path: Path) -> dict[str, Any]:
    """Reads an untrusted JSON file.

    Raises:
      ConversionError: the file is missing, too large, or does not contain a JSON object.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConversionError(f"{path} is not a regular file. Copy it again.", path=path)
        size = path.stat().st_size
        if size > _LARGEST_JSON:
            raise ConversionError(
                f"{path} has {size:,} bytes, too many for this JSON file. Copy it again.", path=path
            )
        content = parse_json(path.read_bytes())
    except OSError as error:
        raise ConversionError(f"{path} cannot be read ({error.strerror}).", path=path) from None
    except ValueError as error:
        raise ConversionError(f"{path} is damaged ({error}). Copy it again.", path=path) from None
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConversionError(f"{path} is damaged: expected an object, found {kind}.", path=path)
    return content


def check_memory(size: int, path: Path) -> None:
    """Checks that weights fit into the memory of this machine.

    Args:
      size: bytes of all arrays.

    Raises:
      ConversionError: the weights are larger than the memory.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ConversionError(
            f"{path} claims {size / 2**30:,.0f} GiB of weights, but this machine has "
            f"{memory / 2**30:,.0f} GiB of memory. Copy the file again or use a larger machine.",
            path=path,
        )


def check_finite(arrays: Mapping[str, np.ndarray], place: str) -> None:
    """Checks that all numbers are finite.

    Args:
      place: the source of the arrays, at the beginning of the message.

    Raises:
      ConversionError: an array contains NaN or infinity.
    """
    wrong = [name for name, array in arrays.items() if not np.isfinite(array).all()]
    if wrong:
        raise ConversionError(
            f"{place} contains NaN or infinity in {len(wrong)} of {len(arrays)} arrays, first in "
            f"{wrong[0]}: training diverged or the file is damaged. Use another checkpoint.",
            field=wrong[0],
        )


def shown(value: Any) -> str:
    """Returns the repr of a value for a message, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def first_line(error: Exception) -> str:
    """Returns the first line of an error message without its period, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__
