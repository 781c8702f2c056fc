"""Matrix products and dense layers that accumulate in float32, in the gradients too.

A parameter's gradient is a sum over all tokens of a batch; in bfloat16, 16,384 ones sum to 4,096.
Autodiff accumulates in the dtype of the operands and leaves the precision of bfloat16 sums to the
compiler; these functions do not.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.custom_batching
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from convbert_jax import machine
from convbert_jax.ops import dispatch, partitioning

DENSE = "dense"
_LANES = 128  # lanes of a TPU vector register
SUBLANES = 8  # sublanes of a TPU vector register
_MUCH_LARGER = 8  # size ratio from which a CPU with a matrix unit transposes the smaller factor
_FILLS_A_GPU = 1 << 21  # elements: a 128 x 128 tile for each multiprocessor of an H100


def einsum(
    equation: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Computes jnp.einsum of two arrays with float32 accumulation.

    Gradients have the dtypes of the arguments. The gradient of a float32 parameter `y` is not
    rounded, even if `x` is bfloat16, except for communication (`communicate_gradients_in`).

    Args:
      equation: each letter occurs in exactly two of `x`, `y` and the result.
      x: first factor.
      y: second factor, cast to the dtype of `x`.
      dtype: dtype of the result.
    """
    return _product(equation, x, y, dtype, partitioning.grad_comm_dtype())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _product(equation, x, y, dtype, sent):
    return multiply(equation, x, _factor(equation, x, y), dtype)


def _factor(equation, x, y):
    left, right = equation.split("->")[0].split(",")
    return y.astype(x.dtype) if left[0] in right else _parameter(x, y)


def _parameter(x, y):
    """Casts a parameter to the dtype of `x`, then all-gathers it over `fsdp`."""
    return partitioning.all_gather_param(y.astype(x.dtype))


def _forward(equation, x, y, dtype, sent):
    return _product(equation, x, y, dtype, sent), (x, y)


def _backward(equation, dtype, sent, saved, cotangent):
    x, y = saved
    operands, result = equation.split("->")
    left, right = operands.split(",")
    cotangent = cotangent.astype(x.dtype)
    factor = _factor(equation, x, y)
    d_x = multiply(f"{result},{right}->{left}", cotangent, factor, x.dtype)
    if left[0] in right:  # `y` has a row axis, so it is not a parameter
        return d_x, _sum_over_rows(left, result, right, x, cotangent, y.dtype)

    def of_rows(x, cotangent):
        return _sum_over_rows(left, result, right, x, cotangent, y.dtype)

    return d_x, partitioning.sum_over_rows(of_rows, (x, cotangent), sent).astype(y.dtype)


_product.defvjp(_forward, _backward)


def _sum_over_rows(left, result, right, x, cotangent, dtype):
    """Computes the gradient of `y`, summing over rows.

    XLA for CPUs transposes the first factor to sum over rows. The smaller factor therefore comes
    first, and the result is transposed if necessary: logits can be 60 times as large as the hidden
    states. With a matrix unit, transposing the result costs as much as transposing a factor several
    times its size, so the factors must differ by _MUCH_LARGER.
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
        # The barrier keeps XLA from merging the transposition into the product.
        product = jax.lax.optimization_barrier(product)
        return jnp.einsum(f"{order}->{right}", product)

    @turned.def_vmap
    def together(size, are_batched, x, y):
        """Vmaps without the transposition: XLA for CPUs (jax 0.10.2) crashes on both together."""
        plain = functools.partial(multiply, f"{first[0]},{second[0]}->{right}", dtype=dtype)
        axes = tuple(0 if batched else None for batched in are_batched)
        return jax.vmap(plain, axes, axis_size=size)(x, y), True

    return turned(first[1], second[1])


def multiply(
    equation: str, x: Float[Array, "..."], y: Float[Array, "..."], dtype: jnp.dtype
) -> Float[Array, "..."]:
    """Computes `einsum` without its gradient, for custom_vjp functions and inference.

    Autodiff of this function would accumulate in the dtypes of the factors. Factors are not cast,
    and any einsum equation is allowed.
    """
    if dispatch.platform() == "cpu":
        return _on_a_cpu(equation, x, y).astype(dtype)
    written = _written(equation, x, y, dtype)
    product = functools.partial(jnp.einsum, equation, preferred_element_type=written)
    if dispatch.platform() == "tpu" and (row := _only_row(equation, x)):
        return _as_of_many(product, *row, x, y).astype(dtype)
    return product(x, y).astype(dtype)


def _on_a_cpu(equation, x, y):
    """Computes the product on a CPU, in float32 unless a matrix unit supports bfloat16.

    XLA for CPUs crashes on some batched products of bfloat16 factors with float32 accumulation
    (bgi,gio->bgo, jax 0.10.2 to 0.12.0). Plain matrix products work and use the matrix unit.
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
    return x.dtype == y.dtype == jnp.bfloat16 and machine.multiplies_bfloat16()


def _written(equation, x, y, dtype):
    """Returns the dtype in which the product is written; accumulation is always float32.

    On a GPU a product is a separate kernel, so writing the result in 16 bits halves the traffic.
    Small results stay float32, because the kernel may be split into partial sums, which would be
    rounded before they are added. The same holds for devices that split channels.
    """
    if dispatch.platform() != "gpu" or partitioning.splits_heads():
        return jnp.float32
    factors, result = equation.split("->")
    sizes = dict(zip(factors.replace(",", ""), (*x.shape, *y.shape), strict=True))
    fills = math.prod(sizes[axis] for axis in result) >= _FILLS_A_GPU
    return dtype if fills else jnp.float32


def _only_row(equation, x):
    """Returns the row axis of `x` and its index in the result if `x` has one row, else None.

    Row axes of `x` are those that the other factor lacks; the last one is returned.
    """
    operands, result = equation.split("->")
    left, right = operands.split(",")
    own = [axis for axis, letter in enumerate(left) if letter not in right]
    if not own or any(x.shape[axis] > 1 for axis in own):
        return None
    return own[-1], result.index(left[own[-1]])


def _as_of_many(product, axis, place, x, y):
    """Computes a vector-matrix product as a matrix product, by adding rows of zeros.

    XLA for TPU uses the vector unit for vectors, which is slower than the matrix unit. When one
    text is generated token by token, every product is of this kind.
    """
    pads = [(0, SUBLANES - 1 if at == axis else 0) for at in range(x.ndim)]
    return jax.lax.slice_in_dim(product(jnp.pad(x, pads), y), 0, 1, axis=place)


def dense(
    x: Float[Array, "*B C"],
    kernel: Float[Array, "C C_out"],
    bias: Float[Array, "*#B C_out"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*B C_out"]:
    """Computes x kernel + bias (None: no bias), rounded once to `dtype`; factors as in `einsum`.

    Rematerialization policies can save the result by its checkpoint name DENSE.
    """
    batch = "abcd"[: x.ndim - 1]
    # A GPU kernel adds the bias before rounding and writing, if both have the same dtype.
    written = dtype if dispatch.platform() == "gpu" else jnp.float32
    product = einsum(f"{batch}i,io->{batch}o", x, kernel, written)
    return _finish(product, bias, dtype)


def _finish(product, bias, dtype):
    if bias is not None:
        # Broadcast before the cast to 16 bits: the gradient is a sum in float32.
        bias = jnp.broadcast_to(bias.astype(jnp.float32), product.shape)
        product = product + bias.astype(product.dtype)
    return checkpoint_name(product.astype(dtype), DENSE)


def fused_dense(
    x: Float[Array, "*B C"],
    kernels: Sequence[Float[Array, "C _"]],
    biases: Sequence[Float[Array, " _"] | None],
    dtype: jnp.dtype,
) -> list[Float[Array, "*B _"]]:
    """Applies several `dense` layers, one per kernel and bias, to the same input.

    On a TPU the gradient of `x` is one product with all kernels. With separate products the
    compiler writes each result to memory and then reads them again to add them
    (benchmarks/notes/tpu_steps.md).
    """
    if dispatch.platform() != "tpu" or partitioning.splits_heads():
        return [dense(x, *each, dtype) for each in zip(kernels, biases, strict=True)]
    products = _products_of_one(x, tuple(kernels), partitioning.grad_comm_dtype())
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

        return partitioning.sum_over_rows(of_rows, (x, cotangent), sent).astype(kernel.dtype)

    return d_x, tuple(map(of_kernel, cotangents, kernels))


_products_of_one.defvjp(_products_forward, _products_backward)


def grouped_dense(
    x: Float[Array, "*B C"],
    kernel: Float[Array, "G I O"],
    bias: Float[Array, " C_out"] | None,
    dtype: jnp.dtype,
) -> Float[Array, "*B C_out"]:
    """Applies a grouped `dense` layer: each of G groups of adjacent channels has its own kernel.

    C = G I and C_out = G O. Slicing at channels that are not multiples of 128 copies the whole
    array on a TPU. That costs more than one product with a block-diagonal matrix
    (benchmarks/notes/tpu_steps.md).
    """
    cut = any(size % _LANES for size in kernel.shape[1:])
    if dispatch.platform() == "tpu" and cut and not partitioning.splits_heads():
        product = _product_of_groups(x, kernel, partitioning.grad_comm_dtype() or kernel.dtype)
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

    # Each device slices its local sum, so blocks off the diagonal are not communicated.
    return d_x, partitioning.sum_over_rows(of_rows, (x, cotangent), sent).astype(kernel.dtype)


_product_of_groups.defvjp(_groups_forward, _groups_backward)
