"""A compiled TPU program as text: its operations in order, what the compiler estimates for each,
and the Pallas kernels, which it does not look into.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A Pallas kernel as it stands in the compiled program: enough to compile it alone."""

    config: str
    operands: tuple[str, ...]  # shapes with layouts, in HLO's notation
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A scheduled operation that costs something; `cycles` of one run, None if not estimated."""

    name: str
    times: int
    cycles: float | None
    source: str
    kernel: KernelCall | None = None


_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_END = re.compile(r'^\}(, execution_thread="\w+")?$')
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_BODIES = re.compile(r"(?:to_apply|calls|body|true_computation|false_computation)=%([\w.\-]+)")
_ESTIMATE = re.compile(r'"window_config":\{[^}]*?"estimated_cycles":"(\d+)"')
# What runs beside, on the SparseCores of v5p and v6e, as lookups in large tables do.
_SPARSE_CORE = 'execution_thread="sparsecore"'
_CALLED = re.compile(r"called_computations=\{%([\w.\-]+)\}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COLLECTIVE = re.compile(r"^(reduce-scatter|all-\w+(-\w+)?|collective-permute)(-start)?$")
# Cost time, but the compiler gives no estimate for them.
_UNESTIMATED = re.compile(rf"{_COLLECTIVE.pattern}|^(sort|scatter|gather|rng[\w-]*)(-start)?$")


class Instruction(NamedTuple):
    """One line of a computation: %name = shape opcode(rest."""

    name: str
    shape: str
    opcode: str
    rest: str


class Scheduled(NamedTuple):
    """An instruction that runs on its own, not inside a fusion, and how often."""

    instruction: Instruction
    times: int
    computation: str


class Computations(dict[str, dict[str, Instruction]]):
    """A compiled program (`compiled.as_text()`): computation -> name -> instruction, in order."""

    entry: str

    def __init__(self, text: str):
        super().__init__()
        lines, last = None, None
        for line in text.splitlines():
            if start := _COMPUTATION.match(line):
                lines = self[start[2]] = {}
                if start[1]:
                    self.entry = start[2]
            elif lines is not None and (found := _INSTRUCTION.match(line)):
                last = found[1]
                lines[last] = Instruction(*found.groups())
            elif lines and not _END.match(line):  # an attribute went over the end of the line
                lines[last] = lines[last]._replace(rest=lines[last].rest + line)

    def walk(self) -> Iterator[Scheduled]:
        """What is scheduled, loops with their trip counts; of branches the dearer one."""
        return self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[Scheduled]:
        for instruction in self[name].values():
            opcode, rest = instruction.opcode, instruction.rest
            if opcode == "while":
                yield from self._walk(_BODIES.search(rest)[1], times * _trips(rest, self))
            elif opcode == "conditional":
                branches = _BODIES.findall(rest) or _BRANCHES.search(rest)[1].split(", ")
                paths = [list(self._walk(branch.lstrip("%"), times)) for branch in branches]
                yield from max(paths, key=lambda path: sum(s.times * _cycles(s) for s in path))
            elif _SPARSE_CORE in rest:
                if opcode == "async-start":
                    yield from self._beside(instruction, times, name)
            elif opcode in ("call", "async-start") and (body := _BODIES.search(rest)):
                yield from self._walk(body[1], times)
            else:
                yield Scheduled(instruction, times, name)

    def _beside(self, start: Instruction, times: int, name: str) -> list[Scheduled]:
        """What a SparseCore is sent: its collectives, as if the cores waited for them; else it
        counts as one. On TPU7x a custom call stands around what it does.
        """
        inside = []
        for found in self._walk(_BODIES.search(start.rest)[1], times):
            called = _CALLED.search(found.instruction.rest)
            inside += self._walk(called[1], found.times) if called else [found]
        sent = [found for found in inside if _COLLECTIVE.match(found.instruction.opcode)]
        return sent or [Scheduled(start, times, name)]

    def inside(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """What a fusion is made of, with the names of its computations, the innermost too."""
        if instruction.opcode == "fusion":
            body = re.search(r"calls=%([\w.\-]+)", instruction.rest)[1]
            for part in self[body].values():
                yield body, part
                yield from self.inside(part)


def scheduled(text: str) -> list[Operation]:
    """Operations of a compiled TPU program (`compiled.as_text()`) with their trip counts."""
    computations = Computations(text)
    found = []
    for (name, _, opcode, rest), times, computation in computations.walk():
        source = (re.search(r'op_name="([^"]*)"', rest) or ("", ""))[1]
        if '"tpu_custom_call"' in rest:
            kernel = KernelCall(
                re.search(r"backend_config=(\{.*\})", rest)[1],
                *_traffic(name, computations[computation]),
            )
            found.append(Operation(name, times, None, source, kernel))
        elif cycles := _ESTIMATE.search(rest):
            found.append(Operation(name, times, float(cycles[1]), source))
        elif _UNESTIMATED.match(opcode) or _SPARSE_CORE in rest:
            found.append(Operation(name, times, None, source))
    return found


def _cycles(scheduled: Scheduled) -> float:
    found = _ESTIMATE.search(scheduled.instruction.rest)
    return float(found[1]) if found else 0.0


def _trips(rest: str, computations: Computations) -> int:
    """Of a while loop: as XLA found it, or the constant that its counter is compared with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest):
        return int(known[1])
    condition = computations[re.search(r"condition=%([\w.\-]+)", rest)[1]].values()
    limits = [re.match(r"\d+", i.rest)[0] for i in condition if i.opcode == "constant"]
    if len(limits) != 1 or not any("direction=LT" in i.rest for i in condition):
        raise ValueError(f"A loop of the program does not state its trip count: {rest[:200]}")
    return int(limits[0])


VMEM = "S(1)"  # an array that XLA keeps in the core's memory


def _traffic(
    kernel: str, computation: Mapping[str, Instruction]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Shapes of a kernel's operands and results; only what never leaves VMEM keeps its S(1).

    XLA prefetches operands into VMEM and copies results out, and estimates nothing for that: such
    arrays count as read from, or written to, HBM by the kernel.
    """
    _, shape, _, rest = computation[kernel]
    operands = re.findall(r"%([\w.\-]+)", rest[: rest.index("), custom_call_target")])
    parts = {kernel} | {
        name
        for name, (_, _, opcode, rest) in computation.items()
        if opcode == "get-tuple-element" and rest.startswith(f"%{kernel})")
    }
    copied_out = any(
        opcode == "copy-start" and re.match(r"%([\w.\-]+)", rest)[1] in parts
        for _, _, opcode, rest in computation.values()
    )

    def kept(shape, moved):
        return shape.replace(VMEM, "") if moved else shape

    def operand(name):
        _, shape, opcode, _ = computation[name]
        return kept(SHAPE.match(shape)[0], opcode == "copy-done")

    results = (kept(found[0], copied_out) for found in SHAPE.finditer(shape))
    return tuple(map(operand, operands)), tuple(results)


_BITS = {"pred": 8, "bf16": 16}  # others end in their width


def kernel_bytes(kernel: KernelCall) -> int:
    """What a kernel reads of HBM and writes to it, padding of tiles included."""
    shapes = kernel.operands + kernel.results
    return sum(laid_out_bytes(shape) for shape in shapes if VMEM not in shape)


def kernel_traffic(program: str) -> int:
    """The same of all kernels of a compiled program's text, as often as each runs."""
    calls = (each for each in scheduled(program) if each.kernel is not None)
    return sum(each.times * kernel_bytes(each.kernel) for each in calls)


def array_bytes(shape: str) -> int:
    """Bytes of the values of an array like "bf16[32,54]{1,0:T(8,128)(2,1)}", without padding."""
    dtype, dimensions, _ = SHAPE.match(shape).groups()
    return math.prod(int(size) for size in dimensions.split(",") if size) * _bits(dtype) // 8


def laid_out_bytes(shape: str) -> int:
    """Bytes of an array like "bf16[32,54]{1,0:T(8,128)(2,1)}", dimensions padded to whole tiles."""
    dtype, dimensions, layout = SHAPE.match(shape).groups()
    sizes = [int(size) for size in dimensions.split(",") if size]
    if layout and sizes:
        order, _, tiles = layout.partition(":")
        tile = re.match(r"T\(([\d,]+)\)", tiles)
        minor_first = [int(axis) for axis in order.split(",")]
        minor_tile = [int(size) for size in reversed(tile[1].split(","))] if tile else []
        for axis, size in zip(minor_first, minor_tile, strict=False):
            sizes[axis] = math.ceil(sizes[axis] / size) * size
    return math.prod(sizes) * _bits(dtype) // 8


def _bits(dtype: str) -> int:
    return _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
