"""The dynamic convolution as Mosaic kernels for TPU: banded matrix products (see bands.py)."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from convbert_jax.ops import block_sizes
from convbert_jax.ops import pallas_tpu_windows as windows
from convbert_jax.ops.bands import Bands


def forward(
    values: Float[Array, "B L C"],
    weights: Float[Array, "B L HK"],
    segment_ids: Int[Array, "B L"] | None,
    bands: Bands,
    *,
    interpret: object = False,
) -> Float[Array, "B L C"]:
    """The convolution of one group of taps; arguments as in `dynamic_conv`, heads side by side."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_forward", arrays=2, copies=1)
    row = functools.partial(windows.row_block, rows)
    placing = jnp.asarray(bands.placing(), dtype)
    return windows.call(
        functools.partial(_forward_kernel, bands, rows),
        bands, segment_ids, [values, weights, placing],
        [row(values), row(weights), windows.whole(placing)],
        outputs=[jax.ShapeDtypeStruct(values.shape, dtype)],
        output_specs=[row(values)],
        scratch=[windows.copies(bands, dtype), windows.slots(bands)],
        rows=rows,
        interpret=interpret,
    )[0]  # fmt: skip


def _forward_kernel(bands, rows, ids, values, weights, placing, out, apart, filters):
    @pl.loop(0, rows)
    def _(r):
        ids.load(r)
        windows.keep_apart(bands, values[r], ids.real(), apart)
        filters[...] = windows.dot(weights[r], placing[...])

        def window(start, size):
            mask = ids.mask(start, size, bands.offsets)
            windows.convolve(bands, filters[pl.ds(start, size)], mask, apart, start, size, out, r)

        windows.for_windows(bands, window)


def backward(
    values: Float[Array, "B L C"],
    weights: Float[Array, "B L HK"],
    segment_ids: Int[Array, "B L"] | None,
    cotangent: Float[Array, "B L C"],
    bands: Bands,
    *,
    interpret: object = False,
) -> tuple[Float[Array, "B L C"], Float[Array, "B L HK"]]:
    """Cotangents of values and weights."""
    dtype = values.dtype
    rows = block_sizes.rows(bands, len(values), dtype, "plain_backward", arrays=3, copies=2)
    row = functools.partial(windows.row_block, rows)
    placing = jnp.asarray(bands.placing(mirrored=True), dtype)
    d_values, d_weights = windows.call(
        functools.partial(_backward_kernel, bands, rows),
        bands, segment_ids, [values, weights, cotangent, placing],
        [row(values), row(weights), row(cotangent), windows.whole(placing)],
        outputs=[
            jax.ShapeDtypeStruct(values.shape, dtype),
            jax.ShapeDtypeStruct(weights.shape, dtype),
        ],
        output_specs=[row(values), row(weights)],
        scratch=[
            windows.copies(bands, dtype),
            windows.copies(bands, dtype),
            windows.slots(bands, halo=True),
            windows.slots(bands),
        ],
        rows=rows,
        interpret=interpret,
    )  # fmt: skip
    return d_values, d_weights


def _backward_kernel(
    bands, rows, ids, values, weights, cotangent, placing, d_values, d_weights,
    backwards, apart, filters, gradients,
):  # fmt: skip
    @pl.loop(0, rows)
    def _(r):
        windows.fill_halo(bands, filters, windows.dot(weights[r], placing[...]))
        windows.gradients_of_row(
            bands, ids, r, values, cotangent, filters, d_values, gradients, backwards, apart
        )
        d_weights[r] = windows.dot(
            gradients[...].astype(d_weights.dtype), placing[...], contract=(1, 1)
        ).astype(d_weights.dtype)
