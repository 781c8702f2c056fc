"""Products and their gradients, in whatever order a platform multiplies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import dispatch
from convbert_jax.ops.products import dense, dense_of_one, einsum

SIZES = {"a": 3, "b": 5, "i": 4, "o": 17, "h": 2, "v": 41, "e": 4}
# Inputs wider than outputs and the other way round, a table read from either side, batched axes.
EQUATIONS = [
    *("abi,io->abo", "abo,oi->abi", "abe,ve->abv", "abv,ve->abe", "ai,io->ao"),
    *("habi,hio->habo", "ahi,hio->aho", "abhi,hio->abo", "bhi,ahi->bha"),
]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_gradients_are_those_of_the_product(equation, dtype):
    """A parameter is float32, and so is its gradient, whatever the other factor is."""
    left, right = equation.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (
        jax.random.normal(key, [SIZES[axis] for axis in axes])
        for key, axes in zip(keys, (left, right), strict=False)
    )
    like = jnp.einsum(equation, x, y)
    weights = jax.random.normal(keys[2], like.shape)
    x, y, weights = (value.astype(dtype).astype(jnp.float32) for value in (x, y, weights))

    def ours(x, y):
        return (einsum(equation, x.astype(dtype), y, jnp.float32) * weights).sum()

    found = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, y)
    wanted = jax.grad(lambda x, y: (jnp.einsum(equation, x, y) * weights).sum(), (0, 1))(x, y)
    assert found[1].dtype == jnp.float32
    rounded = 1e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(found[0], wanted[0], rtol=rounded, atol=rounded)
    np.testing.assert_allclose(found[1], wanted[1], rtol=1e-4, atol=1e-4)


def test_on_a_cpu_the_smaller_factor_is_turned_over():
    """Of hidden states [1536, 128] and logits [1536, 8000] it is the hidden states."""
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs alone")
    x, y = jnp.ones((1_536, 128)), jnp.ones((8_000, 128))

    def loss(x, y):
        return einsum("ae,ve->av", x, y, jnp.float32).sum()

    program = jax.jit(jax.grad(loss, argnums=1)).lower(x, y).compile().as_text()
    assert "f32[8000,1536]" not in program


def test_gradients_of_seeds_together_are_those_of_each():
    """Of a head of two labels on three texts: a product that was turned over ended the process."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, y = jax.random.normal(keys[0], (2, 3, 32)), jax.random.normal(keys[1], (2, 32, 2))

    def loss(y, x):
        return jnp.square(einsum("ai,io->ao", x, y, jnp.float32)).sum()

    both = jax.grad(loss, argnums=(0, 1))
    for axes, texts in (((0, 0), x), ((0, None), x[0])):
        together = jax.jit(jax.vmap(both, in_axes=axes))(y, texts)
        for seed in range(2):
            alone = both(y[seed], x[seed] if axes[1] == 0 else x[0])
            for many, one in zip(together, alone, strict=True):
                np.testing.assert_allclose(many[seed], one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [(5,), (3, 5)])
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_layers_of_one_input_are_each_of_them(platform, rows, monkeypatch):
    """Of different widths; on a TPU the gradient of the input is one product."""
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    keys = iter(jax.random.split(jax.random.key(0), 9))
    x = jax.random.normal(next(keys), (*rows, 4))
    kernels = [jax.random.normal(next(keys), (4, width)) for width in (6, 2, 9)]
    biases = [jax.random.normal(next(keys), (width,)) for width in (6, 2, 9)]

    def together(x, kernels, biases):
        return dense_of_one(x, kernels, biases, jnp.float32)

    def each(x, kernels, biases):
        return [dense(x, *one, jnp.float32) for one in zip(kernels, biases, strict=True)]

    (found, back), (wanted, wanted_back) = (
        jax.vjp(function, x, kernels, biases) for function in (together, each)
    )
    ours, theirs = (found, back(wanted)), (wanted, wanted_back(wanted))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    products = str(jax.make_jaxpr(back)(wanted)).count("dot_general")
    assert products == {"cpu": 6, "tpu": 4}[platform]
