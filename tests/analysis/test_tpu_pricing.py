"""Reading costs out of compiled TPU programs, and the benchmarks that print them."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from benchmarks import timing
from benchmarks.layers import dynamic_conv, layer
from convbert_jax.analysis.tpu import chips
from convbert_jax.analysis.tpu import pricing as tpu_pricing
from convbert_jax.analysis.tpu import program as tpu_program
from convbert_jax.ops.dynamic_conv import dynamic_conv as dynamic_conv_op
from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv
from tests.conftest import REPOSITORY
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
    found = {o.name: o for o in tpu_program.scheduled(PROGRAM)}
    assert {name: (o.times, o.cycles) for name, o in found.items()} == {
        "double": (12, 10.0),
        "kernel.7": (12, None),
        "sort.1": (1, None),  # nothing estimates it
        "last": (1, 5.0),
    }
    assert found["double"].source == "jit(f)/mul"
    kernel = found["kernel.7"].kernel
    assert json.loads(kernel.config) == {"custom_call_config": {"body": "TUw"}}
    # The first operand was made in VMEM and never leaves it.
    assert kernel.operands == ("f32[8,64]{1,0:T(8,128)S(1)}", "f32[8,64]{1,0:T(8,128)}")
    assert kernel.results == ("f32[8,64]{1,0:T(8,128)}",)


def test_a_loop_without_a_trip_count_is_refused():
    with pytest.raises(ValueError, match="does not state its trip count"):
        tpu_program.scheduled(PROGRAM.replace("direction=LT", "direction=GT"))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("bf16[32,512,54]{2,1,0:T(8,128)(2,1)}", 32 * 512 * 128 * 2),
        ("bf16[32,512,54]{1,0,2:T(8,128)(2,1)}", 54 * 32 * 512 * 2),
        ("s32[5]{0:T(128)}", 128 * 4),
        ("f32[3,7]{1,0}", 84),
        ("pred[]", 1),
    ],
)
def test_bytes_of_a_laid_out_array(shape, size):
    assert tpu_program.laid_out_bytes(shape) == size


def test_floors_are_traffic_at_full_bandwidth():
    assert chips.chip("tpu:v5e").clock == pytest.approx(1.503e9, rel=1e-3)
    assert chips.chip("tpu:v5e").bandwidth_cycles(819e9) == pytest.approx(1.503e9, rel=1e-3)
    with pytest.raises(ValueError, match="target is 'tpu:v9', but must be one of tpu:v4, tpu:v5e"):
        chips.chip("tpu:v9")


def test_alternating_runs_are_all_timed():
    order = []
    times = timing.alternate({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b"] * 3  # the first round warms up
    assert [len(times[name]) for name in "ab"] == [2, 2]
    assert timing.paired_ratio([1.0, 2.0, 4.0], [2.0, 6.0, 4.0]) == 2.0


@pytest.mark.tpu_compile
@needs_libtpu
def test_filters_of_float32_parameters_pass_the_profilers_checks():
    """A layer's projection is float32. Rounded in the kernel it was refused there."""
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
    """A selection that a product read out of memory became a masked product, which it refused."""
    values = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
    filters = jax.ShapeDtypeStruct((1, 128, 2, 7), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)

    def run(values, filters, ids, cotangent):
        def convolve(values, filters):
            return dynamic_conv_op(
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


def _lines(module, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.layers.{module}", "--json", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_operation_is_timed_on_a_cpu():
    rows = _lines(
        "dynamic_conv", "--target=cpu", "--batch=1", "--length=16", "--rounds=1",
        "--only", "xla", "shift and accumulate, autodiff", "pallas_tpu",
    )  # fmt: skip
    refused = [row for row in rows if row["implementation"] == "pallas_tpu"]
    assert len(refused) == 4
    assert all(row["cost"] is None and "pallas_tpu" in row["note"] for row in refused)
    rows = [row for row in rows if row not in refused]
    assert {(row["op"], row["direction"]) for row in rows} >= {
        (op, direction) for op in dynamic_conv.OPS for direction in dynamic_conv.DIRECTIONS
    }
    for row in rows:
        assert set(row) >= {
            "op", "implementation", "direction", "shape", "dtype", "target", "cost", "unit",
            "floor", "ratio_to_floor",
        }  # fmt: skip
        assert row["cost"] > 0
        assert row["ratio_to_floor"] == pytest.approx(row["cost"] / row["floor"])


@pytest.mark.slow
def test_layers_are_timed_on_a_cpu():
    rows = _lines("layer", "--target=cpu", "--batch=1", "--lengths", "16", "--rounds=1")
    assert {row["layer"] for row in rows} == set(layer.LAYERS)
    for row in rows:
        assert set(row) >= {
            "layer", "length", "batch", "direction", "target", "cost", "unit",
            "ratio_to_attention",
        }  # fmt: skip
        if row["layer"] == "attention":
            assert row["ratio_to_attention"] == 1


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
def test_the_price_of_xla_is_the_known_one():
    """446 thousand cycles by the TPU compiler's model; another compiler may say something else."""
    (row, *_) = _lines("dynamic_conv", "--target=tpu:v5e", "--only", "xla", "--ops", "dynamic_conv")
    assert row["floor"] == pytest.approx(49.4, abs=0.1)
    assert row["cost"] == pytest.approx(446, rel=0.1)
