"""Reader of compiled programs: operations, estimated cycles, Pallas kernels, collectives."""

import dataclasses
import itertools
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from convbert_jax.objectives.cross_entropy import RARELY_TAKEN

_DUMP = "*.after_codegen.txt"  # last dump, with the compiler's estimates


def compile_as_text(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles a lowered program and returns it with its text.

    The text is the compiler's dump. On chips with SparseCores (v5p, v6e, TPU7x) `as_text()` fails
    on offloaded operations (jaxlib 0.10.2, libtpu 0.0.52): "async-update instruction should have 1
    operands but sees 3". It is used only if the program came from the cache, which dumps nothing.

    Raises:
      jax.errors.JaxRuntimeError: compilation failed.
    """
    with tempfile.TemporaryDirectory(prefix="convbert_jax.") as folder:
        compiled = lowered.compile({"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
        dumps = list(pathlib.Path(folder).glob(_DUMP))
        if len(dumps) != 1:
            return compiled, compiled.as_text()
        return compiled, dumps[0].read_text()


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A Pallas kernel in a compiled program, sufficient to compile it separately."""

    config: str
    operands: tuple[str, ...]  # shapes with layouts, in HLO's notation
    results: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Operation:
    """A scheduled operation; `cycles` per execution is None without an estimate."""

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
# Operations on the SparseCores of v5p and v6e, such as lookups in large tables.
_SPARSE_CORE = 'execution_thread="sparsecore"'
_CALLED = re.compile(r"called_computations=\{%([\w.\-]+)\}")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COLLECTIVE = re.compile(r"^(reduce-scatter|all-\w+(-\w+)?|collective-permute)(-start)?$")
# Operations that take time but have no estimate.
_UNESTIMATED = re.compile(rf"{_COLLECTIVE.pattern}|^(sort|scatter|gather|rng[\w-]*)(-start)?$")


class Instruction(NamedTuple):
    """An instruction of a computation: %name = shape opcode(rest."""

    name: str
    shape: str
    opcode: str
    rest: str


class Scheduled(NamedTuple):
    """A scheduled instruction, not inside a fusion, and its number of executions."""

    instruction: Instruction
    times: int
    computation: str


class Computations(dict[str, dict[str, Instruction]]):
    """A compiled program (`compiled.as_text()`): computation -> name -> instruction."""

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
            elif lines and not _END.match(line):  # an attribute continues on this line
                lines[last] = lines[last]._replace(rest=lines[last].rest + line)

    def walk(self) -> Iterator[Scheduled]:
        """Yields all scheduled instructions.

        Of branches, only the most expensive one; the cheapest one in the scope RARELY_TAKEN.
        """
        return self._walk(self.entry, 1)

    def _walk(self, name: str, times: int) -> Iterator[Scheduled]:
        for instruction in self[name].values():
            opcode, rest = instruction.opcode, instruction.rest
            if opcode == "while":
                yield from self._walk(_BODIES.search(rest)[1], times * _trips(rest, self))
            elif opcode == "conditional":
                branches = _BODIES.findall(rest) or _BRANCHES.search(rest)[1].split(", ")
                paths = [list(self._walk(branch.lstrip("%"), times)) for branch in branches]
                choose = min if RARELY_TAKEN in rest else max
                yield from choose(paths, key=lambda path: sum(s.times * _cycles(s) for s in path))
            elif _SPARSE_CORE in rest:
                if opcode == "async-start":
                    yield from self._beside(instruction, times, name)
            elif opcode in ("call", "async-start") and (body := _BODIES.search(rest)):
                yield from self._walk(body[1], times)
            else:
                yield Scheduled(instruction, times, name)

    def _beside(self, start: Instruction, times: int, name: str) -> list[Scheduled]:
        """Returns the collectives that a SparseCore runs, as blocking ones, or else `start`.

        On TPU7x they are wrapped in a custom call.
        """
        inside = []
        for found in self._walk(_BODIES.search(start.rest)[1], times):
            called = _CALLED.search(found.instruction.rest)
            inside += self._walk(called[1], found.times) if called else [found]
        sent = [found for found in inside if _COLLECTIVE.match(found.instruction.opcode)]
        return sent or [Scheduled(start, times, name)]

    def inside(self, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
        """Yields (computation, instruction) inside a fusion, recursively."""
        if instruction.opcode == "fusion":
            body = re.search(r"calls=%([\w.\-]+)", instruction.rest)[1]
            for part in self[body].values():
                yield body, part
                yield from self.inside(part)


def scheduled(text: str) -> list[Operation]:
    """Lists the operations of a compiled TPU program (`compiled.as_text()`)."""
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
    """Returns a while loop's trip count: XLA's, or the constant in its condition."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest):
        return int(known[1])
    condition = computations[re.search(r"condition=%([\w.\-]+)", rest)[1]].values()
    limits = [re.match(r"\d+", i.rest)[0] for i in condition if i.opcode == "constant"]
    if len(limits) != 1 or not any("direction=LT" in i.rest for i in condition):
        raise ValueError(f"Unknown trip count of a while loop: {rest[:200]}")
    return int(limits[0])


VMEM = "S(1)"  # memory space of arrays that XLA keeps in VMEM


def _traffic(
    kernel: str, computation: Mapping[str, Instruction]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the shapes of a kernel's operands and results.

    XLA prefetches operands into VMEM and copies results out without an estimate. Such arrays count
    as HBM traffic of the kernel; only arrays that stay in VMEM keep their S(1).
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


_BITS = {"pred": 8, "bf16": 16}  # other names end in their width


def kernel_bytes(kernel: KernelCall) -> int:
    """Returns the HBM bytes that a kernel reads and writes, including tile padding."""
    shapes = kernel.operands + kernel.results
    return sum(laid_out_bytes(shape) for shape in shapes if VMEM not in shape)


def kernel_traffic(program: str) -> int:
    """Sums `kernel_bytes` over all executions of kernels in a compiled program's text."""
    calls = (each for each in scheduled(program) if each.kernel is not None)
    return sum(each.times * kernel_bytes(each.kernel) for each in calls)


def array_bytes(shape: str) -> int:
    """Returns the bytes of an array like "bf16[32,54]{1,0:T(8,128)(2,1)}", without padding."""
    dtype, dimensions, _ = SHAPE.match(shape).groups()
    return math.prod(int(size) for size in dimensions.split(",") if size) * _bits(dtype) // 8


def laid_out_bytes(shape: str) -> int:
    """Returns the bytes of an array like "bf16[32,54]{1,0:T(8,128)(2,1)}", with tile padding."""
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


# Bytes that a device sends in a ring of n, divided by the size of the whole array x (n - 1) / n.
KINDS = {
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 1,
    "collective-permute": 1,
}
BETWEEN_SLICES = "slices"  # pseudo-axis: traffic that leaves a slice
_KIND = re.compile(rf"^({'|'.join(KINDS)})(-start)?$")
_SCATTERS = "all-reduce-scatter"  # name of the compiler's reduce-scatter fusions


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
      kind: one of KINDS.
      axes: mesh axes that it spans, joined by "+"; "other" for groups that match no axes;
        BETWEEN_SLICES for traffic to other slices.
      times: number of executions.
      array_bytes: bytes of the whole array: the input of a reduction or the output of a gather.
      group: number of participating devices.
      overlapped: whether it overlaps with computation.
      source: source name in the program.
    """

    kind: str
    axes: str
    times: int
    array_bytes: int
    group: int
    overlapped: bool
    source: str

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends in all executions, with a ring algorithm."""
        if self.kind == "collective-permute":
            return float(self.times * self.array_bytes)
        part = (self.group - 1) / self.group
        return self.times * KINDS[self.kind] * self.array_bytes * part


def find_collectives(text: str, axes: Mapping[str, int], slices: int = 1) -> list[Collective]:
    """Finds the collectives of a compiled program, largest traffic first.

    Args:
      text: program text (`compiled.as_text()`).
      axes: mesh axis -> size within one slice, in the order of the mesh's devices.
      slices: number of slices.
    """
    computations = Computations(text)
    found: dict[tuple[str, str], Collective] = {}
    for scheduled in computations.walk():
        if between := _between_slices(scheduled, slices):
            found[scheduled.computation, scheduled.instruction.name] = between
        for body, part in _parts(computations, scheduled.instruction):
            kind, started = _KIND.match(part.opcode).groups()
            # A collective that overlaps with products is part of several fusions, which share its
            # channel. Channels alone are not unique: all collective-permutes can share one.
            channel = re.search(r"channel_id=(\d+)", part.rest) if body else None
            key = scheduled.computation, channel[1] if channel else part.name
            if key in found:
                continue
            groups = _groups(part.rest, int(np.prod(list(axes.values()))))
            found[key] = Collective(
                kind="reduce-scatter" if body.startswith(_SCATTERS) else kind,
                axes=_name_axes(groups, axes),
                times=scheduled.times,
                array_bytes=_array_bytes(part, kind, bool(started)),
                group=len(next(iter(groups))),
                overlapped=bool(started) or (body != "" and not body.startswith(_SCATTERS)),
                source=(re.search(r'op_name="([^"]*)"', part.rest) or ("", ""))[1],
            )
    alone = [c for c in found.values() if c.group > 1]
    return sorted(alone, key=lambda c: -c.sent_bytes)


def _between_slices(scheduled: Scheduled, slices: int) -> Collective | None:
    """Returns the collective over slices whose data this instruction sends to the host."""
    part = scheduled.instruction
    if part.opcode != "send" or "xla_megascale" not in part.rest:
        return None
    named = re.search(r'_xla_host_transfer_rendezvous="([a-z-]+)', part.rest)
    kind = named[1] if named and named[1] in KINDS else "all-reduce"
    sent = [shape[0] for shape in SHAPE.finditer(part.shape) if shape[1] != "token"]
    size = max(map(array_bytes, sent))
    source = (re.search(r'op_name="([^"]*)"', part.rest) or ("", ""))[1]
    return Collective(kind, BETWEEN_SLICES, scheduled.times, size, slices, True, source)


def _parts(
    computations: Computations, instruction: Instruction
) -> Iterator[tuple[str, Instruction]]:
    """Yields (fusion computation or "", collective) of an instruction."""
    for body, part in (("", instruction), *computations.inside(instruction)):
        if _KIND.match(part.opcode):
            yield body, part


def _array_bytes(part: Instruction, kind: str, started: bool) -> int:
    shapes = [found[0] for found in SHAPE.finditer(part.shape)]
    sizes = [array_bytes(shape) for shape in shapes]
    if started and kind != "all-reduce":  # (input, output, scalars)
        return max(sizes)
    if kind == "reduce-scatter":
        return sum(sizes) * len(next(iter(_groups(part.rest, 1))))
    return sum(sizes)


def _groups(rest: str, devices: int) -> frozenset[frozenset[int]]:
    """Returns the groups of device indices in the mesh; one group of all if not specified."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        chosen = re.findall(r"'(\w+)'", named[2])
        return _over(
            tuple(int(size) for size in sizes.values()), [list(sizes).index(n) for n in chosen]
        )
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape = [int(n) for n in iota[3].split(",")]
        ids = np.arange(np.prod(shape)).reshape(shape)
        if iota[4]:
            ids = ids.transpose([int(n) for n in iota[4].split(",")])
        rows = ids.reshape(int(iota[1]), int(iota[2]))
        return frozenset(frozenset(map(int, row)) for row in rows)
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return frozenset(frozenset(map(int, group.split(","))) for group in groups)
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", rest):
        linked = [set(map(int, p.split(","))) for p in re.findall(r"\{([\d,]+)\}", pairs[1])]
        return frozenset(map(frozenset, _join(linked)))
    return frozenset([frozenset(range(devices))])


def _join(sets: list[set[int]]) -> list[set[int]]:
    """Merges sets that share a member."""
    joined: list[set[int]] = []
    for new in sets:
        touching = [old for old in joined if old & new]
        joined = [old for old in joined if not old & new]
        joined.append(new.union(*touching))
    return joined


def _over(sizes: tuple[int, ...], chosen: list[int]) -> frozenset[frozenset[int]]:
    """Returns the groups of devices that differ only along the axes `chosen` of a mesh."""
    ids = np.arange(np.prod(sizes)).reshape(sizes)
    kept = [axis for axis in range(len(sizes)) if axis not in chosen]
    rows = ids.transpose([*kept, *chosen]).reshape(-1, int(np.prod([sizes[i] for i in chosen])))
    return frozenset(frozenset(map(int, row)) for row in rows)


def _name_axes(groups: frozenset[frozenset[int]], axes: Mapping[str, int]) -> str:
    wide = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(wide) + 1):
        for names in itertools.combinations(wide, count):
            chosen = [list(axes).index(name) for name in names]
            if _over(tuple(axes.values()), chosen) == groups:
                return "+".join(names)
    return "other"
