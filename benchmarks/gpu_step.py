"""Number of programs and bytes of whole training steps, as compiled by XLA for an H100.

    pip install "jax[cuda13]"                       # its compiler; no GPU and no driver
    python -m benchmarks.gpu_step
    python -m benchmarks.gpu_step --configs small --config.model.scan_unroll=1 --operations 20

Nothing runs. A narrow model is likely limited by the rate at which the host launches programs,
which are counted here; a wide one by products and memory traffic. Bytes include operands and
results; slices count only the accessed part. Products use cuBLAS without autotuning, which needs
a GPU. On a GPU, XLA may replace them by Triton kernels.
"""

import argparse
import collections
import dataclasses
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping

from benchmarks import timing
from convbert_jax.analysis.hlo import SHAPE, Computations, Instruction, array_bytes
from convbert_jax.command_line import overrides

# GPU description for XLA, from NVIDIA's data sheet and programming guide (compute capability 9.0).
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 l2_cache_size: 52428800
  memory_bandwidth: 3352320000000 device_memory_size: 84929347584
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
NO_DROPOUT = {"model.attention_dropout": 0.0}  # enables cuDNN attention
KINDS = ("products", "kernels", "cuDNN", "sums", "the rest")
# Instructions that launch nothing on the device.
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all")
FREE += ("fusion-done", "copy-done")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configs", nargs="+", default=["small", "base"])
    parser.add_argument("--operations", type=int, default=0, help="print the N largest")
    options, rest = parser.parse_known_args()
    fields, rest = overrides.take(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        sys.exit('The compiler for GPUs is not installed: pip install "jax[cuda13]".')
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}",
    }
    table = timing.Table("config", "programs", *KINDS, "GB", "GiB", "s")
    for name in options.configs:
        text, temporaries, seconds = compile_step(name, NO_DROPOUT | fields)
        programs = list(read_programs(text))
        counts = collections.Counter(
            program.kind for program in programs for _ in range(program.times)
        )
        moved = sum(program.times * program.size for program in programs)
        of_kinds = (counts[kind] for kind in KINDS)
        table.add(name, counts.total(), *of_kinds, moved / 1e9, temporaries / 2**30, seconds)
        most_expensive = sorted(programs, key=lambda one: -one.times * one.size)
        for one in most_expensive[: options.operations]:
            size = f"{one.times:4} x {one.size / 1e6:9.2f} MB"
            print(f"    {size}  {one.kind:9} {one.source}")


def compile_step(name: str, fields: dict) -> tuple[str, int, float]:
    """Returns a compiled step, its temporary bytes and the seconds of its compilation.

    Args:
      name: config name as for `benchmarks.step.read_config`.
      fields: "model.layers" -> value.
    """
    import jax
    from jax.experimental import topologies

    from benchmarks.step import read_config
    from convbert_jax.recipes import planning
    from convbert_jax.training.partitioning import make_mesh
    from convbert_jax.training.train_step import make_program

    device, *_ = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices
    config = read_config(name, None, fields)
    mesh = make_mesh(config.mesh, [device])
    with jax.set_mesh(mesh):
        program = make_program(planning.make_task(config, device), config, mesh)
        step = program.train_step.trace(program.abstract, planning.make_batch(config))
        started = time.perf_counter()
        compiled = step.lower(lowering_platforms=("cuda",)).compile()
    seconds = time.perf_counter() - started
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, seconds


# --- Parsing the compiled module ---


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that the host launches.

    Attributes:
      times: launches per step, including repetitions by loops.
      size: bytes read and written per launch.
      source: origin in the names of the code.
    """

    kind: str
    times: int
    size: int
    source: str


def read_programs(text: str) -> Iterator[Program]:
    """Yields the programs of an HLO module optimized for a GPU."""
    computations = Computations(text)
    for one, times, computation in computations.walk():
        if one.opcode in FREE:
            continue
        called = re.search(r"calls=%([\w.\-]+)", one.rest) if "fusion" in one.opcode else None
        fused = computations[called[1]] if called else {}
        source = re.search(r'op_name="([^"]*)"', one.rest)
        moved = _moved(one, fused, computations[computation])
        yield Program(_kind(one, fused), times, moved, source[1] if source else one.name)


def _kind(one: Instruction, fused: Mapping[str, Instruction]) -> str:
    texts = " ".join(each.rest for each in [one, *fused.values()])
    if "__cublas" in texts or "__triton_gemm" in texts:
        return "products"
    if "__gpu$xla.gpu.triton" in texts:
        return "kernels"
    if "__cudnn" in texts:
        return "cuDNN"
    return "sums" if "kind=kInput" in one.rest else "the rest"


def _moved(
    one: Instruction, fused: Mapping[str, Instruction], around: Mapping[str, Instruction]
) -> int:
    if not fused or any("__cublas" in each.rest for each in fused.values()):
        return _size(one.shape) + sum(_size(around[name].shape) for name in _operands(one))
    total, written_into = 0, set()
    root = list(fused.values())[-1]
    results = [fused[name] for name in _operands(root)] if root.opcode == "tuple" else [root]
    for result in results:
        last = result
        while last.opcode in ("bitcast", "copy", "convert"):
            last = fused[_operands(last)[0]]
        if last.opcode == "dynamic-update-slice":
            stack, update, *_ = _operands(last)
            total += _size(fused[update].shape)
            written_into.add(stack)
        else:
            total += _size(result.shape)
    for name, parameter in fused.items():
        if parameter.opcode != "parameter":
            continue
        readers = [each for each in fused.values() if name in _operands(each)]
        if name in written_into and len(readers) == 1:
            continue  # in place
        cut = [r for r in readers if r.opcode == "dynamic-slice" and _operands(r)[0] == name]
        whole = not cut or len(cut) < len(readers)
        total += _size(parameter.shape) if whole else sum(_size(each.shape) for each in cut)
    return total


def _operands(one: Instruction) -> list[str]:
    return re.findall(r"%([\w.\-]+)", one.rest.partition(")")[0])


def _size(shape: str) -> int:
    """Returns the bytes of an array or tuple, without 8-bit arrays (workspaces of products)."""
    arrays = (found for found in SHAPE.finditer(shape) if found[1] not in ("s8", "u8"))
    return sum(array_bytes(found[0]) for found in arrays)


if __name__ == "__main__":
    main()
