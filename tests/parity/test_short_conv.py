"""LFM2's short convolution against transformers' class, and its centered form in PyTorch.

Outputs and gradients; packed documents and padding are compared with each document alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers.gated import Short

pytestmark = pytest.mark.parity
torch = transformers = None  # set by imported_late

CHANNELS, LENGTH = 12, 10
IDS = np.array([[1] * LENGTH, [1] * 4 + [2] * 3 + [0] * 3])
DOCUMENTS = [(0, slice(0, LENGTH)), (1, slice(0, 4)), (1, slice(4, 7))]


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch and transformers only when the tests run."""
    global torch, transformers
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))


def lfm2(taps):
    """Return transformers' module with random weights of deviation 0.4."""
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = transformers.Lfm2Config(
        hidden_size=CHANNELS, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=taps
    )
    module, generator = Lfm2ShortConv(config, 0), torch.Generator().manual_seed(taps)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    return module


def centered(module, x):
    """Compute the module with a convolution that reads K // 2 positions before each one."""
    before, after, values = module.in_proj(x).chunk(3, dim=-1)
    taps = module.conv.weight.shape[-1]
    past = taps // 2
    padded = torch.nn.functional.pad((before * values).mT, (past, taps - 1 - past))
    convolved = torch.nn.functional.conv1d(padded, module.conv.weight, groups=CHANNELS).mT
    return module.out_proj(after * convolved)


def to_ours(tensors):
    """Convert arrays with transformers' names to our parameters."""
    return {
        "input": {"kernel": tensors["in_proj.weight"].T},
        "depthwise": tensors["conv.weight"][:, 0].T,
        "output": {"kernel": tensors["out_proj.weight"].T},
    }


@pytest.mark.parametrize(("taps", "causal"), [(3, True), (3, False), (4, True), (4, False)])
def test_the_mixer_is_lfm2s(taps, causal):
    rng, theirs = np.random.default_rng(taps), lfm2(taps)
    x, cotangent = rng.standard_normal((2, *IDS.shape, CHANNELS)).astype(np.float32)
    cotangent[IDS == 0] = 0
    given = torch.tensor(x, requires_grad=True)
    wanted = np.zeros_like(x)
    run = theirs if causal else functools.partial(centered, theirs)
    for row, part in DOCUMENTS:
        out = run(given[row : row + 1, part])
        out.backward(torch.tensor(cotangent[row : row + 1, part]))
        wanted[row, part] = out.detach().numpy()[0]

    start = initializers("glorot", 0.02)
    mixer = Short(taps, "xla", mask_convolution=True)
    made = nnx.eval_shape(lambda: mixer.module(CHANNELS, start, nnx.Rngs(0), causal))
    params = to_ours({name: p.detach().numpy() for name, p in theirs.named_parameters()})

    @jax.jit
    def ours(params, x):
        module = nnx.graphdef(made)
        out, back = jax.vjp(lambda p, x: nnx.merge(module, p)(x, jnp.asarray(IDS)), params, x)
        return out, back(jnp.asarray(cotangent))

    out, (d_params, d_x) = ours(params, x)
    close = functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5)
    close(out[IDS != 0], wanted[IDS != 0])
    close(d_x, given.grad)
    jax.tree.map(
        close, d_params, to_ours({name: p.grad.numpy() for name, p in theirs.named_parameters()})
    )
