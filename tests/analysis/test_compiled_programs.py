"""Costs and collectives read from compiled TPU programs."""

import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from convbert_jax.analysis import hlo, tpu_devices, tpu_pricing
from convbert_jax.ops.convolution import dynamic_conv, span_dynamic_conv
from tests.running import needs_libtpu

PROGRAM = """\
HloModule jit_f, is_scheduled=true
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %sum = f32[] add(%a, %b), backend_config={"window_config":{"estimated_cycles":"999"}}
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[]{:T(128)}, f32[8,64]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,64]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %double = f32[8,64]{1,0:T(8,128)S(1)} fusion(%x), kind=kLoop, calls=%add, metadata={op_name="jit(f)/mul"}, backend_config={"window_config":{"k":[],"estimated_cycles":"10"}}
  %kernel.7 = f32[8,64]{1,0:T(8,128)} custom-call(%double, %x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"of": "several lines"
}}, backend_config={"custom_call_config":{"body":"TUw"}}
  ROOT %t = (s32[], f32[8]) tuple(%x, %kernel.7)
}
%condition (p.1: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
ENTRY %main (x.1: f32[8]) -> f32[8] {
  %x.1 = f32[8,64]{1,0:T(8,128)} parameter(0)
  %while = (s32[], f32[8]) while(%x.1), condition=%condition, body=%body
  %sort.1 = f32[8]{0} sort(%x.1), dimensions={0}, to_apply=%add
  ROOT %last = f32[8]{0} copy(%sort.1), backend_config={"window_config":{"estimated_cycles":"5"}}
}
"""  # noqa: E501


def test_operations_of_a_loop_count_as_often_as_it_runs():
    found = {o.name: o for o in hlo.scheduled(PROGRAM)}
    assert {name: (o.times, o.cycles) for name, o in found.items()} == {
        "double": (12, 10.0),
        "kernel.7": (12, None),
        "sort.1": (1, None),  # has no cost estimate
        "last": (1, 5.0),
    }
    assert found["double"].source == "jit(f)/mul"
    kernel = found["kernel.7"].kernel
    assert json.loads(kernel.config) == {"custom_call_config": {"body": "TUw"}}
    # The first operand is created in VMEM and stays there.
    assert kernel.operands == ("f32[8,64]{1,0:T(8,128)S(1)}", "f32[8,64]{1,0:T(8,128)}")
    assert kernel.results == ("f32[8,64]{1,0:T(8,128)}",)


@pytest.mark.parametrize(("scope", "times"), [("loss", [12, 1]), ("rarely_taken", [12])])
def test_the_most_expensive_branch_counts_unless_it_is_rarely_taken(scope, times):
    branches = "true_computation=%body, false_computation=%condition"
    metadata = f'metadata={{op_name="jit(f)/{scope}/cond"}}'
    program = PROGRAM.replace("copy(%sort.1)", f"conditional(%p, %x, %x), {branches}, {metadata}")
    assert [o.times for o in hlo.scheduled(program) if o.name == "double"] == times


def test_a_loop_without_a_trip_count_is_refused():
    with pytest.raises(ValueError):  # noqa: PT011
        hlo.scheduled(PROGRAM.replace("direction=LT", "direction=GT"))


def test_bytes_of_a_laid_out_array():
    sizes = {
        "bf16[32,512,54]{2,1,0:T(8,128)(2,1)}": 32 * 512 * 128 * 2,
        "bf16[32,512,54]{1,0,2:T(8,128)(2,1)}": 54 * 32 * 512 * 2,
        **{"s32[5]{0:T(128)}": 128 * 4, "f32[3,7]{1,0}": 84, "pred[]": 1},
    }
    assert {shape: hlo.laid_out_bytes(shape) for shape in sizes} == sizes


def test_the_clock_and_bandwidth_of_a_chip():
    assert tpu_devices.chip("tpu:v5e").clock == pytest.approx(1.503e9, rel=1e-3)
    assert tpu_devices.chip("tpu:v5e").bandwidth_cycles(819e9) == pytest.approx(1.503e9, rel=1e-3)
    with pytest.raises(ValueError, match="tpu:v9"):
        tpu_devices.chip("tpu:v9")


AXES = {"data": 2, "fsdp": 4, "tensor": 1}
HEAD = """\
HloModule jit_f, is_scheduled=true
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
"""
# A gather that overlaps with products is split into three fusions with one channel.
LOOP = """\
%begins (p: bf16[16,8]) -> bf16[64,8] {
  ROOT %all-gather.1 = bf16[64,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}, metadata={op_name="jit(f)/weights"}
}
%goes_on (p: bf16[16,8]) -> bf16[64,8] {
  %all-gather.2 = bf16[64,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %dot = bf16[64,8]{1,0} convolution(%all-gather.2, %p)
}
%all-reduce-scatter.3 (p: f32[64,8]) -> f32[16,8] {
  %all-reduce.3 = f32[64,8]{1,0:T(8,128)} all-reduce(%p), channel_id=8, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %part = f32[16,8]{1,0} dynamic-slice(%all-reduce.3)
}
%body (p: (s32[])) -> (s32[]) {
  %x = bf16[16,8]{1,0} parameter(0)
  %fusion.1 = bf16[64,8]{1,0} fusion(%x), kind=kCustom, calls=%begins
  %fusion.2 = bf16[64,8]{1,0} fusion(%x), kind=kOutput, calls=%goes_on
  %fusion.3 = f32[16,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %t = (s32[]) tuple(%x)
}
%condition (p.1: (s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %while = (s32[]) while(%x), condition=%condition, body=%body
  %all-reduce.9 = (f32[100]{0:T(128)}, f32[5,3]{1,0:T(8,128)}) all-reduce(%x, %x), channel_id=9, replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add
  %all-gather-start = (f32[4]{0}, f32[32]{0}) all-gather-start(%x), channel_id=10, replica_groups=[1,8]<=[8], dimensions={0}
  %all-gather-done = f32[32]{0} all-gather-done(%all-gather-start)
  %shift = f32[6]{0} collective-permute(%x), channel_id=11, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}
  %odd = f32[10]{0} all-reduce(%x), channel_id=12, replica_groups={{0,7},{1,6},{2,5},{3,4}}, to_apply=%add
  ROOT %alone = f32[10]{0} all-reduce(%x), channel_id=13, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""  # noqa: E501


# SparseCore work: a lookup that the program starts, feeds and awaits in three places, and a sum
# over devices.
BESIDE = """\
%looks_up (t: f32[100,8], i: s32[6]) -> f32[6,8] {
  ROOT %custom-call = f32[6,8]{1,0} custom-call(%t, %i), custom_call_target="lookup"
}, execution_thread="sparsecore"
%adds (p: f32[100]) -> f32[100] {
  ROOT %all-reduce.4 = f32[100]{0:T(128)} all-reduce(%p), channel_id=9, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
}, execution_thread="sparsecore"
ENTRY %main (t: f32[100,8]) -> f32[100] {
  %lookup-start = ((f32[100,8], s32[6]), f32[6,8], s32[]) async-start(), async_execution_thread="sparsecore", calls=%looks_up
  %lookup-update = ((f32[100,8], s32[6]), f32[6,8], s32[]) async-update(%lookup-start, %t, %i)
  %lookup-done = f32[6,8]{1,0} async-done(%lookup-update)
  %sum-start = ((f32[100]), f32[100], s32[]) async-start(%x), async_execution_thread="sparsecore", calls=%adds
  ROOT %sum-done = f32[100]{0} async-done(%sum-start), async_execution_thread="sparsecore"
}
"""  # noqa: E501


# TPU7x has one more nested call (libtpu 0.0.52).
CALLED = """\
%calls (p: f32[100]) -> f32[100] {
  ROOT %custom-call.43 = f32[100]{0:T(128)} custom-call(%p), custom_call_target="TODO(b/522284627)", called_computations={%adds}
}, execution_thread="sparsecore"
"""  # noqa: E501
WITH_CALL = BESIDE.replace("ENTRY", CALLED + "ENTRY").replace("calls=%adds", "calls=%calls")


@pytest.mark.parametrize("text", [BESIDE, WITH_CALL])
def test_what_a_sparse_core_does_is_counted_once(text):
    (sent,) = hlo.find_collectives(HEAD + text, AXES)
    assert (sent.kind, sent.array_bytes, sent.group) == ("all-reduce", 400, 8)
    found = [(one.name, one.cycles) for one in hlo.scheduled(HEAD + text)]
    assert found == [("lookup-start", None), ("all-reduce.4", None)]


def test_every_form_is_read():
    found = {(each.kind, each.axes): each for each in hlo.find_collectives(HEAD + LOOP, AXES)}
    assert {
        key: (each.times, each.array_bytes, each.group, each.overlapped, each.sent_bytes)
        for key, each in found.items()
    } == {
        ("all-gather", "fsdp"): (12, 64 * 8 * 2, 4, True, 12 * 1024 * 3 / 4),
        ("reduce-scatter", "fsdp"): (12, 64 * 8 * 4, 4, False, 12 * 2048 * 3 / 4),
        ("all-reduce", "data"): (1, 460, 2, False, 460),  # twice half of it
        ("all-gather", "data+fsdp"): (1, 128, 8, True, 128 * 7 / 8),
        ("collective-permute", "fsdp"): (1, 24, 4, False, 24),
        ("all-reduce", "other"): (1, 40, 2, False, 40),
    }
    assert found["all-gather", "fsdp"].source == "jit(f)/weights"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_groups_have_the_names_of_their_axes(sizes, data):
    """All three notations are parsed; axes with one device are left out."""
    axes = dict(zip("abc", sizes, strict=False))
    wide = [name for name, size in axes.items() if size > 1]
    subsets = [s for n in range(1, len(wide) + 1) for s in itertools.combinations(wide, n)]
    if not subsets:
        return
    chosen = data.draw(st.sampled_from(subsets))
    numbers = [list(axes).index(name) for name in chosen]
    kept = [i for i in range(len(sizes)) if i not in numbers]
    size = math.prod(sizes[i] for i in numbers)
    order = [*kept, *numbers]
    rows = np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(-1, size)
    listed = ",".join("{" + ",".join(map(str, row)) + "}" for row in rows)
    named = ",".join(f"'x{i}'={n}" for i, n in enumerate(sizes))
    for groups in (
        "{" + listed + "}",
        f"[{len(rows)},{size}]<=[{','.join(map(str, sizes))}]T({','.join(map(str, order))})",
        f"mesh[{named}] {{{','.join(repr(f'x{i}') for i in numbers)}}}",
    ):
        text = HEAD + (
            "ENTRY %main (x: f32[8]) -> f32[8] {\n"
            f"  ROOT %r = f32[3]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, "
            "to_apply=%add\n}\n"
        )
        (found,) = hlo.find_collectives(text, axes)
        assert found.axes == "+".join(chosen), groups
        assert found.sent_bytes == pytest.approx(2 * 12 * (size - 1) / size)


# Gradient of a matrix over two slices of four chips, from libtpu 0.0.52: reduced within each slice;
# one part is sent through the host to the other slice.
BETWEEN = """\
ENTRY %main (x: f32[8]) -> f32[8] {
  %part = f32[256,1024]{1,0:T(8,128)} reduce-scatter(%x), channel_id=4, replica_groups={{0,2},{1,3}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
  %send = (f32[256,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%part, %after), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.2_0",_xla_megascale_reduce_operation="SUM"}
  %recv = (f32[256,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%after), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %gathered = f32[512,1024]{1,0:T(8,128)} all-gather(%part), channel_id=5, replica_groups={{0,2},{1,3}}, dimensions={0}, use_global_device_ids=true
}
"""  # noqa: E501


@pytest.mark.parametrize("slices", [2, 4])
def test_what_leaves_a_slice_is_told_apart(slices):
    axes = {"data": 2, "fsdp": 2}  # within one slice
    found = hlo.find_collectives(HEAD + BETWEEN, axes, slices)
    assert sorted((one.kind, one.axes) for one in found) == [
        ("all-gather", "data"),
        ("all-reduce", hlo.BETWEEN_SLICES),
        ("reduce-scatter", "data"),
    ]
    (between,) = (one for one in found if one.axes == hlo.BETWEEN_SLICES)
    size = 256 * 1024 * 4
    assert between.array_bytes == size
    assert between.sent_bytes == 2 * size * (slices - 1) / slices
    assert between.overlapped


@pytest.mark.tpu_compile
@needs_libtpu
def test_filters_of_float32_parameters_pass_the_profilers_checks():
    """Float32 projections pass; the compiler rejected rounding inside the kernel."""
    tokens = jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16)
    projection, bias = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 18), (18,)))
    ids = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def run(x, projection, bias, ids):
        return span_dynamic_conv(
            x, x, x, projection, bias, heads=2, segment_ids=ids, implementation="pallas_tpu"
        )

    found = tpu_pricing.price(run, tokens, projection, bias, ids, target="tpu:v5e")
    assert found.kernels


@pytest.mark.tpu_compile
@needs_libtpu
def test_the_backward_pass_with_segments_passes_the_profilers_checks():
    """Masks instead of selections of loaded products, which the compiler rejected."""
    values = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    filters = jax.ShapeDtypeStruct((1, 128, 2, 7), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def run(values, filters, ids, cotangent):
        def convolve(values, filters):
            return dynamic_conv(
                values, filters, segment_ids=ids, causal=True, implementation="pallas_tpu"
            )

        return jax.vjp(convolve, values, filters)[1](cotangent)

    found = tpu_pricing.price(run, values, filters, ids, values, target="tpu:v5e")
    assert found.kernels


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_kernel_in_a_loop_is_priced_alone():
    shape = jax.ShapeDtypeStruct((64, 1024), jnp.float32)

    def kernel(x, out):
        out[...] = x[...] * 2

    def function(x):
        double = pl.pallas_call(kernel, out_shape=shape, name="double")
        return jax.lax.scan(lambda x, _: (double(x) + 1, None), x, None, length=7)[0]

    found = tpu_pricing.price(function, shape, target="tpu:v5e")
    (only,) = found.kernels
    assert (only.name, only.times) == ("double", 7)
    assert only.profile_cycles > 0
    assert found.cycles == found.xla_cycles + 7 * only.cycles > 0
