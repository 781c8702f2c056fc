"""Collectives of a compiled TPU program: kind, bytes, mesh axes, overlap with computation."""

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping

import numpy as np

from convbert_jax.analysis.tpu.program import (
    SHAPE,
    Computations,
    Instruction,
    Scheduled,
    array_bytes,
)

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
