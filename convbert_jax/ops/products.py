"""Products of arrays whose sums are float32, in the gradients too.

A gradient of a parameter is a sum over all tokens of a batch: in bfloat16, 16,384 ones add up to
4,096. Autodiff takes the dtype of the operands for what it adds up, so what is written with these
functions never depends on what a compiler makes of a bfloat16 sum.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from convbert_jax.machine import processor
from convbert_jax.ops import dispatch
from convbert_jax.ops.mesh import division, sums

DENSE = "dense"
_LANES = 128  # channels that a TPU keeps side by side
SUBLANES = 8  # and rows of them
_MUCH_LARGER = 8  # than another array, whose product is a matrix unit's
_FILLS_A_GPU = 1 << 21  # numbers: a tile of 128 x 128 for each of an H100's multiprocessors


def einsum(
    equation: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """jnp.einsum of two arrays: factors in the dtype of `x`, sums in float32, result in `dtype`.

    Gradients are in the dtypes of the arguments: that of a float32 parameter `y` is not rounded,
    also where `x` is bfloat16, but on its way between devices under `sums.gradients_sent_in`.

    Args:
      equation: each axis is in two of `x`, `y` and the result, by a letter.
    """
    return _product(equation, x, y, dtype, sums.sent_dtype())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _product(equation, x, y, dtype, sent):
    return multiply(equation, x, _factor(equation, x, y), dtype)


def _factor(equation, x, y):
    left, right = equation.split("->")[0].split(",")
    return y.astype(x.dtype) if left[0] in right else _parameter(x, y)


def _parameter(x, y):
    """`y` in the dtype of `x`, in which it is fetched from the devices that divide it."""
    return division.whole_parameter(y.astype(x.dtype))


def _forward(equation, x, y, dtype, sent):
    return _product(equation, x, y, dtype, sent), (x, y)


def _backward(equation, dtype, sent, saved, cotangent):
    x, y = saved
    operands, result = equation.split("->")
    left, right = operands.split(",")
    cotangent = cotangent.astype(x.dtype)
    factor = _factor(equation, x, y)
    d_x = multiply(f"{result},{right}->{left}", cotangent, factor, x.dtype)
    if left[0] in right:  # `y` has rows as well, so it is no parameter
        return d_x, _sum_over_rows(left, result, right, x, cotangent, y.dtype)

    def of_rows(x, cotangent):
        return _sum_over_rows(left, result, right, x, cotangent, y.dtype)

    return d_x, sums.sum_over_rows(of_rows, (x, cotangent), sent).astype(y.dtype)


_product.defvjp(_forward, _backward)


def _sum_over_rows(left, result, right, x, cotangent, dtype):
    """The gradient of a parameter. XLA's product on a CPU turns over its first factor to add up
    over rows, so there this is the smaller one, and the result is turned over where it must be: a
    vocabulary of 8,000 has logits 60 times as large as the hidden states. Where the matrix unit
    makes the product, turning a result costs as much as turning a factor of a few times its size.
    """
    first, second = (left, x), (result, cotangent)
    if x.size > cotangent.size:
        first, second = second, first
    batched = set(left) & set(result) & set(right)
    order = "".join(a for axes, _ in (first, second) for a in axes if a in right)
    alike = _on_matrix_unit(x, cotangent) and second[1].size < _MUCH_LARGER * first[1].size
    if dispatch.platform() != "cpu" or batched or order == right or alike:
        return multiply(f"{left},{result}->{right}", x, cotangent, dtype)

    @jax.custom_batching.custom_vmap
    def turned(x, y):
        product = multiply(f"{first[0]},{second[0]}->{order}", x, y, dtype)
        # Without it XLA takes the transposition back into the product.
        product = jax.lax.optimization_barrier(product)
        return jnp.einsum(f"{order}->{right}", product)

    @turned.def_vmap
    def together(size, are_batched, x, y):
        """Seeds as an axis: of such a product turned over, XLA (jax 0.10.2) ends the process."""
        plain = functools.partial(multiply, f"{first[0]},{second[0]}->{right}", dtype=dtype)
        axes = tuple(0 if batched else None for batched in are_batched)
        return jax.vmap(plain, axes, axis_size=size)(x, y), True

    return turned(first[1], second[1])


def multiply(
    equation: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """`einsum` for a pass that has its gradients elsewhere, or needs none: autodiff's would be sums
    in the dtypes of the factors. It takes factors as they are, and any axes.
    """
    if dispatch.platform() == "cpu":
        return _on_a_cpu(equation, x, y).astype(dtype)
    written = _written(equation, x, y, dtype)
    product = functools.partial(jnp.einsum, equation, preferred_element_type=written)
    if dispatch.platform() == "tpu" and (row := _only_row(equation, x)):
        return _as_of_many(product, *row, x, y).astype(dtype)
    return product(x, y).astype(dtype)


def _on_a_cpu(equation, x, y):
    """In float32. XLA for CPUs lacks some products of bfloat16 factors with float32 sums and ends
    the program there (bgi,gio->bgo, jax 0.10.2 to 0.12.0). Those of two matrices it has, and gives
    to the matrix unit of a processor that has one.
    """

    def widened(x, y):
        return jnp.einsum(equation, x.astype(jnp.float32), y.astype(jnp.float32))

    left, right, result = equation.replace("->", ",").split(",")
    matrices = not set(left) & set(right) & set(result)
    if not (matrices and _on_matrix_unit(x, y)):
        return widened(x, y)

    @jax.custom_batching.custom_vmap
    def product(x, y):
        return jnp.einsum(equation, x, y, preferred_element_type=jnp.float32)

    @product.def_vmap
    def together(size, are_batched, x, y):
        axes = tuple(0 if batched else None for batched in are_batched)
        return jax.vmap(widened, axes, axis_size=size)(x, y), True

    return product(x, y)


def _on_matrix_unit(x, y):
    return x.dtype == y.dtype == jnp.bfloat16 and processor.multiplies_bfloat16()


def _written(equation, x, y, dtype):
    """The dtype in which a product leaves the matrix unit; what it adds up is float32 in both.

    On a GPU a product is a program of its own, which writes its result: as it is wanted, not twice
    as wide. But one with so small a result may be split into sums of parts, which would be rounded
    before they are added up, and so would be those of devices that divide channels.
    """
    if dispatch.platform() != "gpu" or division.divides_heads():
        return jnp.float32
    factors, result = equation.split("->")
    sizes = dict(zip(factors.replace(",", ""), (*x.shape, *y.shape), strict=True))
    fills = math.prod(sizes[axis] for axis in result) >= _FILLS_A_GPU
    return dtype if fills else jnp.float32


def _only_row(equation, x):
    """The last axis of `x` that the other factor lacks, and its place in the result, where `x` has
    one row; None where it has more.
    """
    operands, result = equation.split("->")
    left, right = operands.split(",")
    own = [axis for axis, letter in enumerate(left) if letter not in right]
    if not own or any(x.shape[axis] > 1 for axis in own):
        return None
    return own[-1], result.index(left[own[-1]])


def _as_of_many(product, axis, place, x, y):
    """The product of a vector as that of a matrix whose other rows are zero. On a TPU XLA takes the
    vector unit for a vector, which by its own model is four to eight times as slow as the matrix
    unit. Where one text is written a token at a time every product is of that kind.
    """
    pads = [(0, SUBLANES - 1 if at == axis else 0) for at in range(x.ndim)]
    return jax.lax.slice_in_dim(product(jnp.pad(x, pads), y), 0, 1, axis=place)


def dense(
    x: Float[Array, "*B C"],
    kernel: Float[Array, "C C_out"],
    bias: Float[Array, "*#B C_out"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*B C_out"]:
    """x kernel + bias in `dtype`, rounded once; factors as in `einsum`. None is no bias.

    Rematerialization can keep the result by the name DENSE.
    """
    batch = "abcd"[: x.ndim - 1]
    # A GPU adds the bias before it rounds and writes the product, if both have its dtype.
    written = dtype if dispatch.platform() == "gpu" else jnp.float32
    product = einsum(f"{batch}i,io->{batch}o", x, kernel, written)
    return _finish(product, bias, dtype)


def _finish(product, bias, dtype):
    if bias is not None and product.dtype.itemsize == 2:
        product = _add_bias(product, bias)
    elif bias is not None:
        product = product + bias.astype(jnp.float32)
    return checkpoint_name(product.astype(dtype), DENSE)


@jax.custom_vjp
def _add_bias(product, bias):
    """In the 16 bits of the product. The gradient of the bias is a float32 sum all the same."""
    return product + bias.astype(product.dtype)


def _add_bias_forward(product, bias):
    return _add_bias(product, bias), bias


def _add_bias_backward(bias, cotangent):
    shape = (1,) * (cotangent.ndim - bias.ndim) + bias.shape
    axes = [axis for axis, size in enumerate(shape) if size == 1]
    d_bias = cotangent.astype(jnp.float32).sum(axes)
    return cotangent, d_bias.reshape(bias.shape).astype(bias.dtype)


_add_bias.defvjp(_add_bias_forward, _add_bias_backward)


def dense_of_one(
    x: Float[Array, "*B C"],
    kernels: Sequence[Float[Array, "C _"]],
    biases: Sequence[Float[Array, " _"] | None],
    dtype: jnp.dtype,
) -> list[Float[Array, "*B _"]]:
    """`dense` of each kernel and bias, all of the same `x`.

    On a TPU the gradient of `x` is one product of all kernels: of one each, the compiler writes out
    every result and then reads them to add them up (benchmarks/RESULTS.md, section 6).
    """
    if dispatch.platform() != "tpu" or division.divides_heads():
        return [dense(x, *each, dtype) for each in zip(kernels, biases, strict=True)]
    products = _products_of_one(x, tuple(kernels), sums.sent_dtype())
    return [_finish(product, bias, dtype) for product, bias in zip(products, biases, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _products_of_one(x, kernels, sent):
    return tuple(
        multiply("...i,io->...o", x, _parameter(x, kernel), jnp.float32) for kernel in kernels
    )


def _products_forward(x, kernels, sent):
    return _products_of_one(x, kernels, sent), (x, kernels)


def _products_backward(sent, saved, cotangents):
    x, kernels = saved
    cotangents = [cotangent.astype(x.dtype) for cotangent in cotangents]
    d_x = multiply(
        "...o,io->...i",
        jnp.concatenate(cotangents, axis=-1),
        jnp.concatenate([_parameter(x, kernel) for kernel in kernels], axis=-1),
        x.dtype,
    )
    rows = "abcd"[: x.ndim - 1]

    def of_kernel(cotangent, kernel):
        def of_rows(x, cotangent):
            return multiply(f"{rows}i,{rows}o->io", x, cotangent, kernel.dtype)

        return sums.sum_over_rows(of_rows, (x, cotangent), sent).astype(kernel.dtype)

    return d_x, tuple(map(of_kernel, cotangents, kernels))


_products_of_one.defvjp(_products_forward, _products_backward)


def dense_of_groups(
    x: Float[Array, "*B C"],
    kernel: Float[Array, "G I O"],
    bias: Float[Array, " C_out"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*B C_out"]:
    """`dense` of each of G groups of neighboring channels by a kernel of its own, side by side.

    A TPU moves all of an array to cut it where no 128 channels end, which costs more than the zeros
    of one product with all kernels on a diagonal (benchmarks/RESULTS.md, section 15).
    """
    cut = any(size % _LANES for size in kernel.shape[1:])
    if dispatch.platform() == "tpu" and cut and not division.divides_heads():
        product = _product_of_groups(x, kernel, sums.sent_dtype() or kernel.dtype)
        return _finish(product, bias, dtype)
    groups = len(kernel)
    biases = [None] * groups if bias is None else jnp.split(bias, groups)
    each = zip(jnp.split(x, groups, axis=-1), kernel, biases, strict=True)
    return jnp.concatenate([dense(*group, dtype) for group in each], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product_of_groups(x, kernel, sent):
    return multiply("...i,io->...o", x, _on_diagonal(x, kernel), jnp.float32)


def _on_diagonal(x, kernel):
    return jax.scipy.linalg.block_diag(*_parameter(x, kernel))


def _groups_forward(x, kernel, sent):
    return _product_of_groups(x, kernel, sent), (x, kernel)


def _groups_backward(sent, saved, cotangent):
    x, kernel = saved
    groups, inputs, outputs = kernel.shape
    cotangent = cotangent.astype(x.dtype)
    d_x = multiply("...o,io->...i", cotangent, _on_diagonal(x, kernel), x.dtype)
    rows = "abcd"[: x.ndim - 1]

    def of_rows(x, cotangent):
        whole = multiply(f"{rows}i,{rows}o->io", x, cotangent, kernel.dtype)
        blocks = whole.reshape(groups, inputs, groups, outputs)
        return jnp.stack([blocks[group, :, group] for group in range(groups)])

    # Of its own rows, so that what is not on the diagonal is sent nowhere.
    return d_x, sums.sum_over_rows(of_rows, (x, cotangent), sent).astype(kernel.dtype)


_product_of_groups.defvjp(_groups_forward, _groups_backward)
