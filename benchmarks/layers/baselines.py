"""Baselines of the dynamic convolution: other formulas with equal outputs."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def published_formula(
    values: Float[Array, "B L H D"], filters: Float[Array, "B L H K"]
) -> Float[Array, "B L H D"]:
    """Official formula: a stack of K shifted copies, then a batched product.

    ConvBERT's repository, model/modeling.py, `attention_layer`: pad, stack slices, reshape to
    [B L H, D, K], matmul with [B L H, K, 1]. Ports keep this form.
    """
    batch, length, heads, width = values.shape
    taps = filters.shape[-1]
    windows = jnp.stack(_reads(values.reshape(batch, length, heads * width), taps), axis=-1)
    windows = windows.reshape(-1, width, taps)
    return jnp.matmul(windows, filters.reshape(-1, taps, 1)).reshape(values.shape)


def published_formula_as_einsum(
    values: Float[Array, "B L H D"], filters: Float[Array, "B L H K"]
) -> Float[Array, "B L H D"]:
    """The same stack and product without the reshapes, which XLA optimizes better."""
    windows = jnp.stack(_reads(values, filters.shape[-1]), axis=-1)
    return jnp.einsum("blhdk,blhk->blhd", windows, filters)


def shift_and_accumulate(
    values: Float[Array, "B L H D"], filters: Float[Array, "B L H K"]
) -> Float[Array, "B L H D"]:
    """One shifted multiply-add per tap with gradients by autodiff, the simplest form in JAX."""
    total = jnp.zeros(values.shape, jnp.float32)
    for i, read in enumerate(_reads(values, filters.shape[-1])):
        total += read.astype(jnp.float32) * filters[..., i, None].astype(jnp.float32)
    return total.astype(values.dtype)


def _reads(values: Array, taps: int) -> list[Array]:
    """Returns the input of each tap: `values` shifted along axis 1, padded with zeros."""
    left, length = taps // 2, values.shape[1]
    padding = ((0, 0), (left, taps - 1 - left)) + ((0, 0),) * (values.ndim - 2)
    padded = jnp.pad(values, padding)
    return [padded[:, i : i + length] for i in range(taps)]


BASELINES: dict[str, Callable] = {
    "published formula": published_formula,
    "published formula as einsum": published_formula_as_einsum,
    "shift and accumulate, autodiff": shift_and_accumulate,
}


def spanned(formula: Callable, heads: int) -> Callable:
    """The whole branch of the official code: logits, softmax over the taps, `formula`."""

    def run(query, span_key, values, projection, bias):
        logits = (query * span_key) @ projection + bias
        by_tap = logits.reshape(*logits.shape[:2], heads, -1).astype(jnp.float32)
        filters = jax.nn.softmax(by_tap).astype(values.dtype)
        by_head = values.reshape(*values.shape[:2], heads, -1)
        return formula(by_head, filters).reshape(values.shape)

    return run


def pytorch_unfold(values, filters):
    """Hugging Face's `ConvBertSelfAttention` on PyTorch tensors, for odd K.

    transformers, models/convbert/modeling_convbert.py: unfold, reshape to [B L H, D, K], matmul.
    """
    from torch.nn import functional

    batch, length, heads, width = values.shape
    taps = filters.shape[-1]
    columns = functional.unfold(
        values.reshape(batch, length, heads * width).transpose(1, 2).contiguous().unsqueeze(-1),
        kernel_size=[taps, 1],
        dilation=1,
        padding=[(taps - 1) // 2, 0],
        stride=1,
    )
    windows = columns.transpose(1, 2).reshape(-1, width, taps)
    return (windows @ filters.reshape(-1, taps, 1)).reshape(values.shape)
