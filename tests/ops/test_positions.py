"""Rows whose positions lie on several devices: the same numbers as on one, values and gradients,
and over the network only what a convolution reads of its neighbors.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.analysis.tpu import collectives
from convbert_jax.ops import attention as attention_op
from convbert_jax.ops import taps, tpu
from convbert_jax.ops.attention import attention
from convbert_jax.ops.depthwise_conv import depthwise_conv
from convbert_jax.ops.dynamic_conv import dynamic_conv
from convbert_jax.ops.mesh import division
from convbert_jax.ops.mesh.division import POSITIONS, WHOLE, Halo
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv

ROWS, LENGTH, HEADS, WIDTH = 2, 32, 2, 4
CHANNELS = HEADS * WIDTH
IDS = np.ones((ROWS, LENGTH), np.int32)
IDS[0, 13:] = 2  # packed: two documents, and padding in the last of eight parts
IDS[0, 29:] = 0
IDS[1, 17:] = 0


def mesh(**sizes):
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=auto)


def normal(*shapes):
    rng = np.random.default_rng(7)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def heads_of(x):
    return x.reshape(*x.shape[:2], HEADS, WIDTH)


def depthwise(x, filters, **options):
    return depthwise_conv(x, filters, **options)


def dynamic(x, filters, **options):
    return dynamic_conv(heads_of(x), filters, **options)


def span(x, span_key, values, projection, bias, **options):
    return span_dynamic_conv(x, span_key, values, projection, bias, heads=HEADS, **options)


def dynamic_conv_block(x, projection, bias, **options):
    return span_dynamic_conv(x, None, None, projection, bias, heads=HEADS, **options)


ROW = (ROWS, LENGTH, CHANNELS)
# op -> (function, shapes of its arrays for K taps, those of [B, L, ...] of them)
OPS = {
    "depthwise": (depthwise, lambda k: (ROW, (k, CHANNELS)), 1),
    "dynamic": (dynamic, lambda k: (ROW, (ROWS, LENGTH, HEADS, k)), 2),
    "light": (dynamic, lambda k: (ROW, (HEADS, k)), 1),
    "span": (span, lambda k: (ROW, ROW, ROW, (CHANNELS, HEADS * k), (HEADS * k,)), 3),
    "of the query": (dynamic_conv_block, lambda k: (ROW, (CHANNELS, HEADS * k), (HEADS * k,)), 1),
}
CASES = [  # op, taps, dilation, causal, segments, implementation, sizes of the mesh
    ("depthwise", 9, 1, False, True, "auto", {"data": 2, "sequence": 4}),
    ("dynamic", 4, 1, False, False, "auto", {"tensor": 2, "sequence": 4}),
    ("dynamic", 3, 7, True, True, "reference", {"sequence": 8}),
    ("light", 31, 1, False, True, "auto", {"sequence": 8}),  # reads four parts on each side
    ("span", 9, 1, False, True, "auto", {"fsdp": 2, "tensor": 2, "sequence": 2}),
    ("span", 6, 2, True, True, "reference", {"data": 2, "sequence": 4}),
    ("of the query", 5, 1, False, False, "auto", {"data": 2, "sequence": 4}),
    ("of the query", 7, 3, True, True, "auto", {"sequence": 8}),
]


def value_and_gradients(run, arrays):
    """Padding holds what nobody may read."""

    def total(*arrays):
        out = run(*arrays)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), out

    places = tuple(range(len(arrays)))
    (_, out), gradients = jax.jit(jax.value_and_grad(total, places, has_aux=True))(*arrays)
    return out, *gradients


@pytest.mark.parametrize(
    ("op", "k", "dilation", "causal", "packed", "implementation", "sizes"),
    CASES,
    ids=[f"{case[0]} of {case[1]} {case[-1]}" for case in CASES],
)
def test_a_convolution_over_divided_rows_is_the_one_over_whole_rows(
    op, k, dilation, causal, packed, implementation, sizes
):
    function, shapes, of_rows = OPS[op]
    arrays = normal(*shapes(k))
    if packed:
        real = jnp.asarray(IDS != 0)[..., None]
        arrays[:of_rows] = [
            jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 3)), x, jnp.nan)
            if op != "span" and x.ndim == 3
            else x
            for x in arrays[:of_rows]
        ]
    run = functools.partial(
        function,
        segment_ids=jnp.asarray(IDS) if packed else None,
        dilation=dilation,
        causal=causal,
        implementation=implementation,
    )
    wanted = value_and_gradients(run, arrays)
    with jax.set_mesh(mesh(**sizes)):
        actual = value_and_gradients(run, arrays)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_a_tpu_kernel_reads_its_neighbors_positions():
    arrays, offsets = normal(ROW, (9, CHANNELS)), taps.offsets(9)
    kernel = functools.partial(tpu.depthwise_conv, interpret=True)

    def over_mesh(x, filters):
        return division.over_mesh(
            lambda *a: kernel(*a, offsets), (x, filters, jnp.asarray(IDS)),
            (POSITIONS, WHOLE, POSITIONS), POSITIONS, halo=Halo(offsets, read=(0, 2)),
        )  # fmt: skip

    wanted = value_and_gradients(functools.partial(depthwise, segment_ids=IDS), arrays)
    with jax.set_mesh(mesh(data=2, sequence=4)):
        actual = value_and_gradients(over_mesh, arrays)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["xla", "splash", "pallas_tpu"])
def test_attention_of_divided_rows(kernel, causal):
    length = LENGTH if kernel == "xla" else 256
    arrays = normal(*[(ROWS, length, HEADS, WIDTH)] * 3)
    ids = jnp.asarray(np.repeat(IDS, length // LENGTH, axis=1))
    real = (ids != 0)[..., None, None]

    def reference(*arrays):
        return jnp.where(real, attention(*arrays, segment_ids=ids, causal=causal), 0)

    def run(*arrays):
        function = getattr(attention_op, kernel)
        if kernel != "xla":
            function = functools.partial(function, interpret=True)
        return jnp.where(real, function(*arrays, ids, ids, causal), 0)

    wanted = value_and_gradients(reference, arrays)
    with jax.set_mesh(mesh(tensor=2, sequence=2)):
        actual = value_and_gradients(run, arrays)
    for one, other in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def compiled_collectives(run, arrays, devices):
    """Those of values and gradients, where each device begins with its part of the rows."""
    over = mesh(sequence=devices)
    place = jax.NamedSharding(over, jax.P(None, "sequence"))
    whole = jax.NamedSharding(over, jax.P())
    places = tuple(place if x.shape[:2] == (ROWS, LENGTH) else whole for x in arrays)

    def total(*arrays):
        return jnp.sum(run(*arrays) ** 2)

    with jax.set_mesh(over):
        step = jax.jit(jax.grad(total, (0, 1, 2)), in_shardings=places, out_shardings=places[:3])
        text = step.lower(*arrays).compile().as_text()
    return collectives.find_collectives(text, dict(over.shape))


def test_a_convolution_sends_its_halo_and_attention_its_rows():
    """Bytes of a device: a convolution's do not grow with the length of its rows."""
    k = 9
    arrays = normal(*OPS["span"][1](k))
    found = compiled_collectives(span, arrays, 4)
    assert {one.kind for one in found} == {"collective-permute"}
    sent = sum(one.sent_bytes for one in found)
    of_halo = ROWS * (k - 1) * CHANNELS * 4  # both sides together, float32
    assert sent == 2 * of_halo  # values, and their gradient on its way back
    arrays = normal(*[(ROWS, LENGTH, HEADS, WIDTH)] * 3)
    gathered = compiled_collectives(attention, arrays, 4)
    assert "all-gather" in {one.kind for one in gathered}
    assert sum(one.sent_bytes for one in gathered) > sent
