"""Values and gradients of convolutions against their definitions, on one device and on meshes."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.analysis import hlo
from convbert_jax.ops import convolution, dispatch, reference
from convbert_jax.ops.attention import attention
from convbert_jax.ops.convolution import depthwise_conv_step, dynamic_conv_step
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, OPS, assert_close, offsets_of, run
from tests.pairwise import pairwise
from tests.refusals import refused

# Kernels are tested in test_pallas_tpu.py and test_pallas_gpu.py.
FORMS = [("xla", F32), ("xla", BF16), ("reference", F32)]
CASES = pairwise(
    list(OPS), [1, 2, 3, 6, 9], [1, 5, 16], FORMS, [1, 2, 3], [False, True], [None, "packed"]
)
TOLERANCE = {F32: 3e-6, BF16: 2**-7}


def spoiled(op, arrays, ids):
    """Put NaN into padding; not for span ops, whose XLA matmul over all rows would spread it."""
    return arrays if op in ("span", "token", "key") else definitions.spoil(arrays, ids)


@pytest.mark.parametrize(("op", "taps", "length", "form", "dilation", "causal", "ids"), CASES)
def test_it_is_the_definition(op, taps, length, form, dilation, causal, ids):
    implementation, dtype = form
    arrays, cotangent = definitions.draw(op, 2, length, 2, 3, taps, dtype)
    ids = definitions.segments(2, length) if ids else None
    function = functools.partial(
        OPS[op], heads=2, dilation=dilation, causal=causal, implementation=implementation,
        segment_ids=None if ids is None else jnp.asarray(ids),
    )  # fmt: skip
    *given, given_cotangent = spoiled(op, [*arrays, cotangent], ids)
    actual = run(function, given, given_cotangent)
    expected = definitions.convolve(op, arrays, cotangent, ids, offsets_of(taps, dilation, causal))
    assert {x.dtype for x in jax.tree.leaves(actual)} == {jnp.dtype(dtype)}
    # In bfloat16 the filters of a span convolution are rounded before use.
    assert_close(actual, expected, TOLERANCE[dtype] * (3 if dtype == BF16 else 1))


def test_definitions_of_the_package_are_exact_in_float64():
    ids, offsets = definitions.segments(2, 9), offsets_of(5, 2)
    with jax.enable_x64(True):
        for op, conv in (
            ("dynamic", reference.dynamic_conv),
            ("depthwise", reference.depthwise_conv),
            ("span", lambda *a: reference.span_dynamic_conv(*a[:-1], 2, a[-1])),
        ):
            arrays, cotangent = definitions.draw(op, 2, 9, 2, 3, 5)
            arrays = [np.asarray(x, np.float64) + 1e-9 for x in arrays]  # not exact in float32
            expected = definitions.convolve(op, arrays, cotangent, ids, offsets)
            out = conv(*arrays, jnp.asarray(ids), offsets)
            assert out.dtype == np.float64
            np.testing.assert_allclose(out, expected[0], atol=1e-13)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("op", ["dynamic", "depthwise"])
def test_nan_of_other_segments_reaches_nothing(op, implementation):
    ids = jnp.asarray([[1] * 4 + [2] * 5 + [3] * 3 + [0] * 3] * 2)
    arrays, cotangent = definitions.draw(op, 2, 15, 2, 3, 9)
    function = functools.partial(OPS[op], heads=2, segment_ids=ids, implementation=implementation)
    clean = run(function, arrays, cotangent)
    *spoiled, spoiled_cotangent = definitions.spoil([*arrays, cotangent], np.asarray(ids) == 2)
    dirty = run(function, spoiled, spoiled_cotangent)
    for one, other in zip(clean, dirty, strict=True):
        if one.ndim > 2:  # the filter gradient of a depthwise convolution sums over all segments
            np.testing.assert_array_equal(one[:, 4:9], other[:, 4:9])
            np.testing.assert_array_equal(other[:, 12:], 0)


def test_bfloat16_is_summed_in_float32():
    values = jnp.concatenate([jnp.full((1, 1, 1, 1), 256.0), jnp.ones((1, 8, 1, 1))], axis=1)
    filters = jnp.ones((1, 9, 1, 9), jnp.bfloat16)
    out = convolution.dynamic_conv(values.astype(jnp.bfloat16), filters)
    assert float(out[0, 4, 0, 0]) == 264.0  # in bfloat16, 256 + 1 is 256


@pytest.mark.parametrize("dilation", [1, 2])
def test_one_step_is_the_last_position_of_a_causal_row(dilation):
    taps, positions = 4, 3 * dilation + 1
    for op, step in (
        ("dynamic", dynamic_conv_step),
        ("light", dynamic_conv_step),
        ("depthwise", depthwise_conv_step),
    ):
        arrays, cotangent = definitions.draw(op, 2, positions, 2, 3, taps)
        expected, *_ = definitions.convolve(
            op, arrays, cotangent, None, offsets_of(taps, dilation, causal=True)
        )
        window, filters = arrays
        last = filters[:, -1] if op == "dynamic" else filters
        np.testing.assert_allclose(
            step(window, last, dilation=dilation), expected[:, -1], atol=1e-6
        )
        with refused(ValueError, step.__name__, positions, list(window[:, 1:].shape)):
            step(window[:, 1:], last, dilation=dilation)


# --- Sequence parallelism ---

DIVIDED = [  # op, taps, dilation, causal, packed, implementation, mesh
    ("depthwise", 9, 1, False, True, "auto", {"data": 2, "sequence": 4}),
    ("dynamic", 4, 1, False, False, "auto", {"tensor": 2, "sequence": 4}),
    ("dynamic", 3, 7, True, True, "reference", {"sequence": 8}),
    ("light", 31, 1, False, True, "auto", {"sequence": 8}),  # reads four shards on each side
    ("span", 9, 1, False, True, "auto", {"fsdp": 2, "tensor": 2, "sequence": 2}),
    ("token", 7, 3, True, True, "auto", {"sequence": 8}),
]


def packed_rows(length=32):
    """Return two documents with padding in the last of eight shards; one document with padding."""
    ids = np.ones((2, length), np.int32)
    ids[0, 13:], ids[0, 29:], ids[1, 17:] = 2, 0, 0
    return ids


@pytest.mark.parametrize(
    ("op", "taps", "dilation", "causal", "packed", "implementation", "sizes"),
    DIVIDED,
    ids=[f"{case[0]} of {case[1]} {case[-1]}" for case in DIVIDED],
)
def test_rows_divided_over_devices(op, taps, dilation, causal, packed, implementation, sizes):
    arrays, cotangent = definitions.draw(op, 2, 32, 2, 4, taps)
    ids = packed_rows() if packed else None
    *given, given_cotangent = spoiled(op, [*arrays, cotangent], ids)
    function = functools.partial(
        OPS[op], heads=2, dilation=dilation, causal=causal, implementation=implementation,
        segment_ids=None if ids is None else jnp.asarray(ids),
    )  # fmt: skip
    with jax.set_mesh(definitions.make_mesh(**sizes)):
        actual = run(function, given, given_cotangent)
    expected = definitions.convolve(op, arrays, cotangent, ids, offsets_of(taps, dilation, causal))
    assert_close(actual, expected, TOLERANCE[F32])


def find_sent(function, arrays):
    """List collectives of the gradients when four devices shard the positions of `arrays[:3]`."""
    mesh = definitions.make_mesh(sequence=4)
    rows, whole = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in ((None, "sequence"), ()))
    places = tuple(rows if x.ndim > 2 else whole for x in arrays)

    def total(*arrays):
        return jnp.sum(function(*arrays) ** 2)

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(total, (0, 1, 2)), in_shardings=places, out_shardings=places[:3])
        text = step.lower(*arrays).compile().as_text()
    return hlo.find_collectives(text, dict(mesh.shape))


def test_a_convolution_sends_its_halo_and_attention_its_rows():
    """The bytes that a convolution sends per device do not grow with the sequence length."""
    arrays, _ = definitions.draw("span", 2, 32, 2, 4, 9)
    found = find_sent(functools.partial(OPS["span"], heads=2), arrays)
    assert {one.kind for one in found} == {"collective-permute"}
    sent = sum(one.sent_bytes for one in found)
    halo = 2 * (9 - 1) * 8 * 4  # rows, positions on both sides, channels, bytes per float32
    assert sent == 2 * halo  # values forward, their gradient backward
    found = find_sent(attention, [x.reshape(2, 32, 2, 4) for x in arrays[:3]])
    assert "all-gather" in {one.kind for one in found}
    assert sum(one.sent_bytes for one in found) > sent


# --- Invalid arguments, and the choice on a GPU ---

ROWS, HEADS = (2, 4, 6), (2, 4, 2, 3)
IDS = {"segment_ids": ((2, 5), "int32")}
REFUSED = {  # op -> [invalid argument, shapes and dtypes of other arguments]
    "depthwise": [
        ("x", {0: ((4, 6), F32)}),
        ("filters", {1: ((9, 4), F32)}),
        ("filters", {1: ((6,), F32)}),
        ("filters", {1: ((0, 6), F32)}),
        ("segment_ids", IDS),
        ("dilation", {"dilation": 0}),
    ],
    "dynamic": [
        ("values", {0: ((4, 2, 3), F32)}),
        ("values", {0: (HEADS, "int32")}),
        ("filters", {1: ((2, 3, 2, 9), F32)}),
        ("filters", {1: ((*HEADS[:3], 0), F32)}),
        ("filters", {1: ((*HEADS[:3], 9), "int32")}),
        ("segment_ids", IDS),
        ("segment_ids", {"segment_ids": ((2, 4), F32)}),
        ("dilation", {"dilation": 0}),
        ("implementation", {"implementation": "cuda"}),
        ("implementation", {"implementation": "pallas_tpu"}),
    ],
    "span": [
        ("values", {2: ((2, 6), F32)}),
        ("values", {2: (ROWS, "int32")}),
        ("query", {0: ((2, 4, 3), F32)}),
        ("span_key", {1: (ROWS, BF16)}),
        ("projection", {3: ((6, 9), F32)}),
        ("projection", {3: ((5, 18), F32)}),
        ("projection", {3: ((6, 0), F32)}),
        ("bias", {4: ((17,), F32)}),
        ("heads", {"heads": 4}),
        ("heads", {"heads": 0}),
        ("segment_ids", IDS),
        ("segment_ids", {"segment_ids": ((2, 4), F32)}),
        ("dilation", {"dilation": 0}),
        ("implementation", {"implementation": "pallas_gpu"}),
    ],
}


@pytest.mark.parametrize("op", REFUSED)
def test_errors_name_op_argument_and_value(op):
    for argument, change in REFUSED[op]:
        arrays, _ = definitions.draw(op, 2, 4, 2, 3, 9)
        options = {"heads": 2}
        for name, value in change.items():
            made = jnp.zeros(*value) if isinstance(value, tuple) else value
            if isinstance(name, int):
                arrays[name] = made
            else:
                options[name] = made
        value = list(made.shape) if hasattr(made, "shape") else made
        with refused(ValueError, op, f": {argument} ", value):
            OPS[op](*arrays, **options)


@pytest.mark.parametrize(
    ("dtype", "capability", "version", "taken"),
    [
        (BF16, "9.0", "cuda 13000", "pallas_gpu"),
        (BF16, "8.0", "cuda 13000", "pallas_gpu"),
        (F32, "9.0", "cuda 13000", "xla"),
        (BF16, "7.5", "cuda 13000", "xla"),
        (BF16, "gfx90a", "rocm 6", "xla"),
    ],
)
def test_auto_takes_the_kernels_on_gpus_that_were_measured(
    monkeypatch, dtype, capability, version, taken
):
    client = types.SimpleNamespace(platform_version=version)
    device = types.SimpleNamespace(
        client=client, compute_capability=capability, device_kind="H100", platform="cpu"
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    x = jnp.zeros((1, 4, 2, 8), dtype)
    for table in (*convolution.IMPLEMENTATIONS.values(),):
        assert dispatch.choose("op", "auto", table, x) is table[taken].function
