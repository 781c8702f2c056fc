"""A compiled TPU program as text: its operations in order, what the compiler estimates for each,
and the Pallas kernels, which it does not look into.
"""

import dataclasses
import math
import re


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
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_BODIES = re.compile(r"(?:to_apply|calls|body|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
# Cost time, but the compiler gives no estimate for them.
_UNESTIMATED = re.compile(
    r"^(sort|scatter|gather|reduce-scatter|all-\w+(-\w+)?|collective-permute|rng[\w-]*)(-start)?$"
)


def scheduled(text: str) -> list[Operation]:
    """Operations of a compiled TPU program (`compiled.as_text()`) with their trip counts."""
    computations, entry, lines, last = {}, None, None, None
    for line in text.splitlines():
        if start := _COMPUTATION.match(line):
            lines = computations[start[2]] = {}
            entry = start[2] if start[1] else entry
        elif lines is not None and (found := _INSTRUCTION.match(line)):
            last = found[1]
            lines[last] = found.groups()[1:]
        elif lines and line != "}":  # an attribute went over the end of the line
            *kept, rest = lines[last]
            lines[last] = (*kept, rest + line)

    def walk(name, times):
        for instruction, (_, opcode, rest) in computations[name].items():
            source = (re.search(r'op_name="([^"]*)"', rest) or ("", ""))[1]
            cycles = re.search(r'"window_config":\{[^}]*?"estimated_cycles":"(\d+)"', rest)
            if opcode == "while":
                yield from walk(_BODIES.search(rest)[1], times * _trips(rest, computations))
            elif opcode == "conditional":
                branches = _BODIES.findall(rest) or _BRANCHES.search(rest)[1].split(", ")
                paths = [list(walk(branch.lstrip("%"), times)) for branch in branches]
                yield from max(paths, key=lambda p: sum(o.times * (o.cycles or 0) for o in p))
            elif opcode in ("call", "async-start") and (body := _BODIES.search(rest)):
                yield from walk(body[1], times)
            elif '"tpu_custom_call"' in rest:
                kernel = KernelCall(
                    re.search(r"backend_config=(\{.*\})", rest)[1],
                    *_traffic(instruction, computations[name]),
                )
                yield Operation(instruction, times, None, source, kernel)
            elif cycles:
                yield Operation(instruction, times, float(cycles[1]), source)
            elif _UNESTIMATED.match(opcode):
                yield Operation(instruction, times, None, source)

    return list(walk(entry, 1))


def _trips(rest, computations) -> int:
    """Of a while loop: as XLA found it, or the constant that its counter is compared with."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest):
        return int(known[1])
    condition = computations[re.search(r"condition=%([\w.\-]+)", rest)[1]].values()
    limits = [re.match(r"\d+", rest)[0] for _, opcode, rest in condition if opcode == "constant"]
    if len(limits) != 1 or not any("direction=LT" in rest for *_, rest in condition):
        raise ValueError(f"A loop of the program does not state its trip count: {rest[:200]}")
    return int(limits[0])


VMEM = "S(1)"  # an array that XLA keeps in the core's memory


def _traffic(kernel: str, computation) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Shapes of a kernel's operands and results; only what never leaves VMEM keeps its S(1).

    XLA prefetches operands into VMEM and copies results out, and estimates nothing for that: such
    arrays count as read from, or written to, HBM by the kernel.
    """
    shape, _, rest = computation[kernel]
    operands = re.findall(r"%([\w.\-]+)", rest[: rest.index("), custom_call_target")])
    parts = {kernel} | {
        name
        for name, (_, opcode, rest) in computation.items()
        if opcode == "get-tuple-element" and rest.startswith(f"%{kernel})")
    }
    copied_out = any(
        opcode == "copy-start" and re.match(r"%([\w.\-]+)", rest)[1] in parts
        for _, opcode, rest in computation.values()
    )

    def kept(shape, moved):
        return shape.replace(VMEM, "") if moved else shape

    def operand(name):
        shape, opcode, _ = computation[name]
        return kept(SHAPE.match(shape)[0], opcode == "copy-done")

    results = (kept(found[0], copied_out) for found in SHAPE.finditer(shape))
    return tuple(map(operand, operands)), tuple(results)


_BITS = {"pred": 8, "bf16": 16}  # others end in their width


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
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype))
    return math.prod(sizes) * bits // 8
