"""What is counted of a program that was compiled for a GPU."""

import importlib.util
import subprocess
import sys

import pytest

from benchmarks import gpu_step
from tests.conftest import REPOSITORY

# As XLA writes it: a loop of two turns around a product, a stack updated in place, a kernel.
HLO = """
HloModule jit_step, is_scheduled=true

%fused_update (stack: f32[4,8], row: f32[1,8], place: s32[]) -> f32[4,8] {
  %stack = f32[4,8]{1,0} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %place = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[4,8]{1,0} dynamic-update-slice(%stack, %row, %place, %zero)
}

%fused_read (stack: f32[4,8], place: s32[]) -> bf16[1,8] {
  %stack.1 = f32[4,8]{1,0} parameter(0)
  %place.1 = s32[] parameter(1)
  %zero.1 = s32[] constant(0)
  %slice = f32[1,8]{1,0} dynamic-slice(%stack.1, %place.1, %zero.1), dynamic_slice_sizes={1,8}
  ROOT %convert = bf16[1,8]{1,0} convert(%slice)
}

%body (state: (s32[], f32[4,8], bf16[8,8])) -> (s32[], f32[4,8], bf16[8,8]) {
  %state = (s32[], f32[4,8]{1,0}, bf16[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack.2 = f32[4,8]{1,0} get-tuple-element(%state), index=1
  %matrix = bf16[8,8]{1,0} get-tuple-element(%state), index=2
  %read = bf16[1,8]{1,0} fusion(%stack.2, %i), kind=kLoop, calls=%fused_read
  %product = (f32[1,8]{1,0}, s8[33554432]{0}) custom-call(%read, %matrix), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(step)/dot_general"}
  %row.1 = f32[1,8]{1,0} get-tuple-element(%product), index=0
  %fusion-start = ((f32[4,8], f32[1,8], s32[]), f32[4,8]{1,0}) fusion-start(%stack.2, %row.1, %i), kind=kLoop, calls=%fused_update
  %fusion-done = f32[4,8]{1,0} fusion-done(%fusion-start)
  ROOT %next = (s32[], f32[4,8]{1,0}, bf16[8,8]{1,0}) tuple(%i, %fusion-done, %matrix)
}

%condition (state: (s32[], f32[4,8], bf16[8,8])) -> pred[] {
  ROOT %yes = pred[] constant(true)
}

%fused_sum (x: bf16[8,8]) -> f32[8] {
  %x = bf16[8,8]{1,0} parameter(0)
  ROOT %sum = f32[8]{0} reduce(%x), dimensions={0}
}

ENTRY %main (a: s32[], b: f32[4,8], c: bf16[8,8]) -> f32[8] {
  %a = s32[] parameter(0)
  %b = f32[4,8]{1,0} parameter(1)
  %c = bf16[8,8]{1,0} parameter(2)
  %all = (s32[], f32[4,8]{1,0}, bf16[8,8]{1,0}) tuple(%a, %b, %c)
  %while = (s32[], f32[4,8]{1,0}, bf16[8,8]{1,0}) while(%all), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %attended = (bf16[8,8]{1,0}, u8[0]{0}) custom-call(%c), custom_call_target="__cudnn$fmhaSoftmax"
  %d = bf16[8,8]{1,0} get-tuple-element(%attended), index=0
  %convolved = bf16[8,8]{1,0} custom-call(%d), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %sum.1 = f32[8]{0} fusion(%convolved), kind=kInput, calls=%fused_sum
}
"""  # noqa: E501


def test_programs_are_counted_as_often_as_they_start():
    programs = list(gpu_step.read_programs(HLO))
    assert [(one.kind, one.times, one.size) for one in programs] == [
        ("the rest", 2, 4 + 4 * 8 + 2 * 8),  # place, a row of the stack, its copy
        ("products", 2, 2 * 8 + 2 * 64 + 4 * 8),  # without its workspace
        ("the rest", 2, 4 * 8 + 4 * 8 + 4),  # the row is read and written, the stack is not
        ("cuDNN", 1, 2 * 2 * 64),
        ("kernels", 1, 2 * 2 * 64),
        ("sums", 1, 2 * 64 + 4 * 8),
    ]
    assert programs[1].source == "jit(step)/dot_general"


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is not None, reason="the compiler is installed"
)
def test_without_the_compiler_it_says_what_to_install():
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_step"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert 'pip install "jax[cuda13]"' in result.stderr
