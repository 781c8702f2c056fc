"""Cost of a program on a TPU by the compiler's model; needs libtpu, but no TPU.

A program is compiled for one chip of a topology. The compiler annotates each XLA operation with
estimated cycles. Pallas kernels are opaque to it, so each distinct kernel is compiled again in a
subprocess with the compiler's static profiler, which aborts on some XLA operations. Nothing runs:
use the estimates to compare variants with each other and with a lower bound, not as times.

    use_compile_only_tpu()                      # before JAX is imported
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

from convbert_jax.analysis.hlo import SHAPE, KernelCall, kernel_bytes, scheduled
from convbert_jax.analysis.tpu_devices import chip, make_devices


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One Pallas kernel of a program.

    Attributes:
      times: number of executions, including trip counts of loops.
      profile_cycles: cycles per execution by the static profiler, which models latency, not
        bandwidth.
      hbm_bytes: bytes per execution of operands and results, including tile padding, excluding
        arrays that XLA keeps in VMEM between operations.
      bandwidth_cycles: lower bound of cycles per execution from `hbm_bytes`.
    """

    name: str
    times: int
    profile_cycles: float
    hbm_bytes: int
    bandwidth_cycles: float

    @property
    def cycles(self) -> float:
        """Cycles per execution: the larger of profile and traffic."""
        return max(self.profile_cycles, self.bandwidth_cycles)


@dataclasses.dataclass(frozen=True)
class Price:
    """Cost of a program by the TPU compiler's model.

    Attributes:
      xla_cycles: sum of the estimates of XLA operations times trip counts.
      kernels: Pallas kernels.
      operations: XLA operations as (name, cycles, source name), most expensive first.
      unpriced: operations that take time but have no estimate (sorts, collectives).
      bytes_accessed: XLA's count of operands and results, with loop bodies counted once.
      temporary_bytes: HBM of the program without arguments and results.
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
        """Total cycles, with each kernel at the larger of profile and traffic."""
        return self.xla_cycles + self.kernel_cycles

    @property
    def profile_cycles(self) -> float:
        """Total cycles, with kernels by the profiler only."""
        return self.xla_cycles + sum(k.times * k.profile_cycles for k in self.kernels)


def use_compile_only_tpu() -> None:
    """Sets the environment for compiling without a TPU; call it before JAX is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # else processes collide on a lock file
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")  # these two silence warnings
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def price(function, *arguments, target: str, kernels: bool = True) -> Price:
    """Compiles `function` for one chip of `target` and sums the compiler's estimates.

    Args:
      arguments: arrays or `jax.ShapeDtypeStruct`s, or trees of them.
      target: "tpu:" and a key of CHIPS.
      kernels: False excludes Pallas kernels; profiling takes minutes and gigabytes for each.

    Raises:
      ValueError: the target is unknown, or the trip count of a loop is unknown.
      RuntimeError: the profiler failed on a kernel (v6e: bfloat16 vector arithmetic).
    """
    return price_compiled(compile_for(function, *arguments, target=target), target, kernels)


def price_compiled(compiled, target: str, kernels: bool = True) -> Price:
    """Sums the estimates for one device of a compiled program.

    Collectives have no estimate; see `hlo.find_collectives`.
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


@functools.cache  # devices of separately opened topologies are not equal
def make_mesh(target: str):
    """Makes a compile-only mesh of one chip of `target`, with the axes of training."""
    from convbert_jax.config import MeshSection
    from convbert_jax.training import partitioning

    return partitioning.make_mesh(MeshSection(), make_devices(chip(target).topology)[:1])


def compile_for(function, *arguments, target: str):
    """Compiles `function` for one chip of `target`.

    Args:
      function: a plain function, or one jitted on a mesh equal to `make_mesh(target)`.
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


# --- Profiling of kernels in subprocesses ---


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
    """Returns the profiled cycles per execution from a subprocess that compiles the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        flag = f"--xla_jf_dump_static_llo_profile_to={folder}"
        done = subprocess.run(
            [sys.executable, "-m", "convbert_jax.analysis.tpu_pricing"],
            input=json.dumps({"target": target, **dataclasses.asdict(kernel)}),
            env=os.environ | {"LIBTPU_INIT_ARGS": flag},
            cwd=pathlib.Path(__file__).parents[2],  # makes a checkout importable
            capture_output=True,
            text=True,
        )
    answer = re.search(r"^cycles (\d+)$", done.stdout, re.MULTILINE)
    if not answer:
        # The compiler aborts the process; its reason is the first fatal line.
        lines = [line for line in done.stderr.splitlines() if not line.startswith("W")]
        fatal = [line for line in lines if re.match(r"F\d+ ", line)] or lines[-1:] or ["no message"]
        raise RuntimeError(f"The TPU compiler returned no profile for {target}: {fatal[0][:300]}")
    return float(answer[1])


def _compile_alone(kernel: KernelCall, target: str) -> int:
    """Returns the profiled cycles of `kernel`; needs a process with the profiler's flag."""
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

    def row_major(structs):  # avoids layout copies, which abort the profiler
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
