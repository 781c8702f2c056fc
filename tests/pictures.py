"""Checks of rendered pictures."""

import numpy as np


def shows_something(path) -> bool:
    """Returns whether a PNG has several colors, each on more than a few pixels."""
    from matplotlib import image

    pixels = np.round(image.imread(path)[..., :3] * 15).reshape(-1, 3)
    _, counts = np.unique(pixels, axis=0, return_counts=True)
    return int((counts > 20).sum()) > 3
