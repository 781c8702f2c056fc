"""LightConv and DynamicConv blocks against the published code's formulas in PyTorch.

Outputs and gradients of encoder (centered) and decoder (causal) blocks, with and without the
gate, in the head layouts of both published modules.

For an even number of taps K the published encoder passes a pair of paddings, which its modules
do not support; with K // 2 they pad as here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers.gated import Dynamic, Light

pytestmark = pytest.mark.parity
torch = None  # set by imported_late

CHANNELS, HEADS, ROWS, LENGTH = 12, 3, 2, 10
WIDTH = CHANNELS // HEADS
# Rows end in padding, which the published encoder zeroes before the convolution.
IDS = np.array([[1] * LENGTH, [1] * (LENGTH - 3) + [0] * 3])
KINDS = [("light", "blocks"), ("light", "modulo"), ("dynamic", "blocks")]
# The cases cover all pairs of values of kind, taps, gate and direction.
CASES = [
    (*kind, taps, (i + j) % 2 == 0, (i + j // 2) % 2 == 0)
    for i, kind in enumerate(KINDS)
    for j, taps in enumerate((1, 3, 4, 31))
]


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch only when the tests run."""
    global torch
    torch = pytest.importorskip("torch")


def parameters(kind, taps, gate):
    """Published layout: linear1 [2 C or C, C], weight [H, K] or [H K, C], linear2."""
    rng = np.random.default_rng(taps)
    inner = CHANNELS * (1 + gate)
    drawn = {
        "x": rng.standard_normal((LENGTH, ROWS, CHANNELS)),
        "linear1": 0.4 * rng.standard_normal((inner, CHANNELS)),
        "bias1": 0.4 * rng.standard_normal(inner),
        "weight": rng.standard_normal(
            (HEADS, taps) if kind == "light" else (HEADS * taps, CHANNELS)
        ),
        "linear2": 0.4 * rng.standard_normal((CHANNELS, CHANNELS)),
        "bias2": 0.4 * rng.standard_normal(CHANNELS),
    }
    return {name: torch.tensor(array, requires_grad=True) for name, array in drawn.items()}


def theirs(kind, p, taps, gate, layout, causal):
    """Compute [T, B, C]: linear, gated linear unit, zeros for padding, convolution, linear."""
    x = p["x"] @ p["linear1"].T + p["bias1"]
    if gate:
        x = x[..., :CHANNELS] * torch.sigmoid(x[..., CHANNELS:])
    if not causal:
        x = x * torch.tensor(IDS.T != 0)[..., None]
    before = taps - 1 if causal else taps // 2
    if kind == "light":
        filters = torch.softmax(p["weight"], dim=-1).expand(LENGTH, ROWS, HEADS, taps)
    else:
        logits = x @ p["weight"].T
        filters = torch.softmax(logits.reshape(LENGTH, ROWS, HEADS, taps), dim=-1)
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, before, taps - 1 - before))
    windows = padded.unfold(0, taps, 1)  # [T, B, C, K]
    if layout == "blocks":  # head c // (C / H)
        by_head = windows.reshape(LENGTH, ROWS, HEADS, WIDTH, taps)
        out = torch.einsum("tbhrk,tbhk->tbhr", by_head, filters)
    else:  # head c mod H
        by_head = windows.reshape(LENGTH, ROWS, WIDTH, HEADS, taps)
        out = torch.einsum("tbrhk,tbhk->tbrh", by_head, filters)
    return out.reshape(LENGTH, ROWS, CHANNELS) @ p["linear2"].T + p["bias2"]


def order(layout):
    """Return the index of our channel (head, offset) in the published layout."""
    channels = np.arange(CHANNELS)
    return channels if layout == "blocks" else channels.reshape(WIDTH, HEADS).T.reshape(-1)


def to_ours(tensors, kind, gate, layout):
    """Convert arrays with published names to our parameters."""
    p, o = tensors, order(layout)
    ours = {
        "value": {"kernel": p["linear1"][:CHANNELS][o].T, "bias": p["bias1"][:CHANNELS][o]},
        "output": {"kernel": p["linear2"][:, o].T, "bias": p["bias2"]},
    }
    if gate:
        ours["gate"] = {"kernel": p["linear1"][CHANNELS:][o].T, "bias": p["bias1"][CHANNELS:][o]}
    if kind == "light":
        return ours | {"filters": p["weight"]}
    return ours | {"conv_kernel": p["weight"][:, o].T}


@functools.cache
def module(kind, taps, gate, causal):
    mixer = {"light": Light, "dynamic": Dynamic}[kind](HEADS, taps, 0.0, "xla", True, glu=gate)
    start = initializers("glorot", 0.02)
    made = nnx.eval_shape(lambda: mixer.module(CHANNELS, start, nnx.Rngs(0), causal))
    return nnx.graphdef(made)


@pytest.mark.parametrize(("kind", "layout", "taps", "gate", "causal"), CASES)
def test_the_block_is_the_published_one(kind, layout, taps, gate, causal):
    given = parameters(kind, taps, gate)
    wanted = theirs(kind, given, taps, gate, layout, causal)
    real = np.ones_like(IDS, bool) if causal else IDS != 0
    cotangent = np.random.default_rng(0).standard_normal((ROWS, LENGTH, CHANNELS))
    cotangent *= real[..., None]  # outputs of padding are undefined
    (wanted * torch.tensor(cotangent.swapaxes(0, 1))).sum().backward()

    numbers = {name: tensor.detach().numpy() for name, tensor in given.items()}
    params = jax.tree.map(
        lambda array: jnp.asarray(array, jnp.float32), to_ours(numbers, kind, gate, layout)
    )
    x = jnp.asarray(numbers["x"].swapaxes(0, 1), jnp.float32)
    ids = jnp.ones_like(IDS) if causal else jnp.asarray(IDS)  # the published decoder has no mask

    @jax.jit
    def run(params, x):
        out, back = jax.vjp(
            lambda p, x: nnx.merge(module(kind, taps, gate, causal), p)(x, ids), params, x
        )
        return out, back(jnp.asarray(cotangent, jnp.float32))

    out, (d_params, d_x) = run(params, x)
    wanted = wanted.detach().numpy().swapaxes(0, 1)
    np.testing.assert_allclose(out[real], wanted[real], atol=1e-5, rtol=1e-5)
    slopes = {name: tensor.grad.numpy() for name, tensor in given.items()}
    np.testing.assert_allclose(d_x, slopes["x"].swapaxes(0, 1), atol=1e-5, rtol=1e-5)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5),
        d_params, to_ours(slopes, kind, gate, layout),
    )  # fmt: skip
