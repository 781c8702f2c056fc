"""Products, and what makes factors of them: the compiler has limits, see `windows.py` too."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

F32, I32 = jnp.float32, jnp.int32


def dot(x, y, contract: tuple[int, int]):
    """The product of two matrices over an axis of each, in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == F32 else None
    axes = ((contract[0],), (contract[1],))
    return jax.lax.dot_general(
        x, y, (axes, ((), ())), precision=precision, preferred_element_type=F32
    )


def turn(x):
    """[positions, lanes] -> [lanes, positions] in float32, in which rows can be cut out."""
    return x.astype(F32).T


def only(mask, x):
    """Float32 `x` where the mask is true or None, else 0, by its bits: of a selection that enters a
    product the compiler makes a masked product, at which its profiler aborts (libtpu 0.0.52).
    """
    if mask is None:
        return x
    return pltpu.bitcast(pltpu.bitcast(x, I32) & jnp.where(mask, -1, 0), F32)
