"""Products and their operands, within the limits of the compiler (see `windows.py`)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

F32, I32 = jnp.float32, jnp.int32


def dot(x, y, contract: tuple[int, int]):
    """Contracts an axis of each of two matrices, with a float32 result."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == F32 else None
    axes = ((contract[0],), (contract[1],))
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision=precision, preferred_element_type=F32
    )


def turn(x):
    """Transposes [positions, lanes] in float32, whose rows can be sliced."""
    return x.astype(F32).T


def only(mask, x):
    """Returns float32 `x` where the mask is True or None, else 0, computed bitwise.

    The compiler fuses a select into a masked product, on which its profiler aborts (libtpu 0.0.52).
    """
    if mask is None:
        return x
    return pltpu.bitcast(pltpu.bitcast(x, I32) & jnp.where(mask, -1, 0), F32)
