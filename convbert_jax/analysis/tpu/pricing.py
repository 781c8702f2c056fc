"""What a program costs on a TPU by the TPU compiler's own model; needs no TPU, only libtpu.

A program is compiled for one chip of a topology. The compiler writes its estimate of cycles into
each XLA operation; a Pallas kernel is opaque to it, so each distinct kernel is compiled once more,
alone, in a process of its own, with the compiler's static profiler on (the profiler aborts on some
XLA operations). Nothing is run: these are the compiler's model, good for comparing variants with
each other and with a floor, not for predicting microseconds.

    use_compile_only_tpu()                      # before jax is imported
    cost = price(function, *arguments, target="tpu:v5e")
"""

import dataclasses
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from convbert_jax.analysis.tpu.chips import chip
from convbert_jax.analysis.tpu.program import SHAPE, KernelCall, kernel_bytes, scheduled
from convbert_jax.analysis.tpu.topology import make_devices


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel of a program.

    Attributes:
      times: how often the program runs it (trip counts of loops included).
      profile_cycles: of one run, by the compiler's static profiler. It models latency, not
        bandwidth.
      hbm_bytes: of one run: operands and results as laid out in memory, padding of tiles included,
        without those that XLA keeps in VMEM between operations.
      bandwidth_cycles: floor of one run from `hbm_bytes`.
    """

    name: str
    times: int
    profile_cycles: float
    hbm_bytes: int
    bandwidth_cycles: float

    @property
    def cycles(self) -> float:
        """Of one run: what is larger, the profile or the traffic."""
        return max(self.profile_cycles, self.bandwidth_cycles)


@dataclasses.dataclass(frozen=True)
class Price:
    """Cost of a program by the TPU compiler's model.

    Attributes:
      xla_cycles: sum of the estimates of XLA's operations, times trip counts.
      kernels: the Pallas kernels.
      operations: XLA operations, the dearest first: (name, cycles, what the source calls it).
      unpriced: operations with work to do and without an estimate (sorts, collectives).
      bytes_accessed: XLA's count of operands and results, the body of a loop once.
      temporary_bytes: HBM that the program needs beside arguments and results.
    """

    xla_cycles: float
    kernels: tuple[Kernel, ...]
    operations: tuple[tuple[str, float, str], ...]
    unpriced: tuple[str, ...]
    bytes_accessed: float
    temporary_bytes: int

    @property
    def kernel_cycles(self) -> float:
        return sum(kernel.times * kernel.cycles for kernel in self.kernels)

    @property
    def cycles(self) -> float:
        """The whole program: XLA's operations and kernels, each at the larger of its two prices."""
        return self.xla_cycles + self.kernel_cycles

    @property
    def profile_cycles(self) -> float:
        """The whole program with kernels by the profiler's figure alone."""
        return self.xla_cycles + sum(k.times * k.profile_cycles for k in self.kernels)


def use_compile_only_tpu() -> None:
    """Sets the environment for compiling without a TPU; to be called before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # two processes collide on a lock file without
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # these two silence warnings
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def price(function, *arguments, target: str, kernels: bool = True) -> Price:
    """Compiles `function` for one chip of `target` and sums up what the compiler estimates.

    Args:
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
      target: "tpu:" and a key of CHIPS.
      kernels: False leaves Pallas kernels out: each takes minutes and gigabytes to profile.

    Raises:
      ValueError: no such target, or a loop whose trip count the program does not state.
      RuntimeError: a kernel that the profiler cannot read (on v6e: bfloat16 vector arithmetic).
    """
    return price_compiled(compile_for(function, *arguments, target=target), target, kernels)


def price_compiled(compiled, target: str, kernels: bool = True) -> Price:
    """The same of a program that is compiled, for one of its devices; what goes over the network
    has no price, see collectives.py.
    """
    found = scheduled(compiled.as_text())
    calls: dict[tuple, int] = {}
    unpriced = []
    for operation in found:
        if operation.kernel is not None:
            key = (operation.name.rpartition(".")[0] or operation.name, operation.kernel)
            calls[key] = calls.get(key, 0) + operation.times
        elif operation.cycles is None:
            unpriced.append(operation.name)
    by_name = [(o.name, o.times * o.cycles, o.source) for o in found if o.cycles is not None]
    memory = compiled.memory_analysis()
    return Price(
        xla_cycles=sum(cycles for _, cycles, _ in by_name),
        kernels=tuple(
            _price_kernel(name, kernel, times, target)
            for (name, kernel), times in calls.items()
            if kernels
        ),
        operations=tuple(sorted(by_name, key=lambda row: -row[1])),
        unpriced=tuple(unpriced),
        bytes_accessed=float(compiled.cost_analysis()["bytes accessed"]),
        temporary_bytes=memory.temp_size_in_bytes,
    )


@functools.cache  # devices of another topology of the same name are others
def make_mesh(target: str):
    """One chip of `target`, which is not here, as a mesh with the axes of training."""
    from convbert_jax.config import MeshSection
    from convbert_jax.training import sharding

    return sharding.make_mesh(MeshSection(), make_devices(chip(target).topology)[:1])


def compile_for(function, *arguments, target: str):
    """`function` compiled for one chip of `target`.

    Args:
      function: to be jitted, or jitted on a mesh that equals `make_mesh(target)`.
    """
    import jax

    mesh = make_mesh(target)
    if not hasattr(function, "lower"):
        function = jax.jit(function)
    here = jax.NamedSharding(mesh, jax.P())
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments
    )
    with jax.set_mesh(mesh):
        return function.lower(*shapes).compile()


# --- Kernels, each alone in a process ---


def _price_kernel(name: str, kernel: KernelCall, times: int, target: str) -> Kernel:
    size = kernel_bytes(kernel)
    return Kernel(
        name=name,
        times=times,
        profile_cycles=_profile(kernel, target),
        hbm_bytes=size,
        bandwidth_cycles=chip(target).bandwidth_cycles(size),
    )


@functools.cache
def _profile(kernel: KernelCall, target: str) -> float:
    """Cycles of one run by the static profiler, from a process that compiles the kernel alone."""
    with tempfile.TemporaryDirectory() as folder:
        flag = f"--xla_jf_dump_static_llo_profile_to={folder}"
        done = subprocess.run(
            [sys.executable, "-m", "convbert_jax.analysis.tpu.pricing"],
            input=json.dumps({"target": target, **dataclasses.asdict(kernel)}),
            env=os.environ | {"LIBTPU_INIT_ARGS": flag},
            cwd=pathlib.Path(__file__).parents[3],  # where the package is found from a checkout
            capture_output=True,
            text=True,
        )
    answer = re.search(r"^cycles (\d+)$", done.stdout, re.MULTILINE)
    if not answer:
        # The compiler aborts the process; its reason is the first fatal line.
        lines = [line for line in done.stderr.splitlines() if not line.startswith("W")]
        fatal = [line for line in lines if re.match(r"F\d+ ", line)] or lines[-1:] or ["no message"]
        raise RuntimeError(f"The TPU compiler gives no profile for {target}: {fatal[0][:300]}")
    return float(answer[1])


def _compile_alone(kernel: KernelCall, target: str) -> int:
    """Profiled cycles of `kernel`; only in a process with the profiler's flag."""
    import jax
    from jax.experimental import layout

    def struct(shape):
        dtype, dimensions, _ = SHAPE.match(shape).groups()
        names = {"pred": "bool", "bf16": "bfloat16", "s": "int", "u": "uint", "f": "float"}
        name = names.get(dtype) or names[dtype[0]] + dtype[1:]
        return jax.ShapeDtypeStruct([int(n) for n in dimensions.split(",") if n], name)

    here = jax.sharding.SingleDeviceSharding(make_devices(chip(target).topology)[0])
    operands = [struct(shape) for shape in kernel.operands]
    results = [struct(shape) for shape in kernel.results]
    call = jax.ffi.ffi_call(
        "tpu_custom_call",
        results,
        custom_call_api_version=1,
        legacy_backend_config=kernel.config,
    )

    def row_major(structs):  # as kernels want it: a copy beside the kernel aborts the profiler
        return tuple(layout.Format(layout.Layout(tuple(range(x.ndim))), here) for x in structs)

    alone = jax.jit(
        lambda *x: tuple(call(*x)),
        in_shardings=row_major(operands),
        out_shardings=row_major(results),
    )
    compiled = alone.lower(*operands).compile()
    line = next(line for line in compiled.as_text().splitlines() if '"tpu_custom_call"' in line)
    return int(re.search(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"', line)[1])


def _main() -> None:
    request = json.load(sys.stdin)
    target = request.pop("target")
    kernel = KernelCall(request["config"], tuple(request["operands"]), tuple(request["results"]))
    print(f"cycles {_compile_alone(kernel, target)}")


if __name__ == "__main__":
    _main()
