"""What a compiled TPU program sends over the network: kind, bytes, axes of the mesh, and whether
the cores wait for it.
"""

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

# Arrays that a device sends, as a multiple of the whole array's size times (n - 1) / n, where a
# ring of n shares the work.
KINDS = {
    "all-reduce": 2,
    "reduce-scatter": 1,
    "all-gather": 1,
    "all-to-all": 1,
    "collective-permute": 1,
}
BETWEEN_SLICES = "slices"  # an axis of no mesh: what leaves a slice
_KIND = re.compile(rf"^({'|'.join(KINDS)})(-start)?$")
_SCATTERS = "all-reduce-scatter"  # how the compiler names a fusion of which each keeps its part


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation in which devices exchange data.

    Attributes:
      kind: one of KINDS.
      axes: of the mesh, over which it goes, joined by "+"; "other" for groups that are none;
        BETWEEN_SLICES for what a device sends to those of other slices.
      times: how often the program runs it.
      array_bytes: of the whole array: what is reduced, or what comes out of a gather.
      group: devices that take part in one.
      overlapped: the cores compute meanwhile.
      source: what the program calls it.
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
        """What a device sends in all its runs, by a ring."""
        if self.kind == "collective-permute":
            return float(self.times * self.array_bytes)
        part = (self.group - 1) / self.group
        return self.times * KINDS[self.kind] * self.array_bytes * part


def find_collectives(text: str, axes: Mapping[str, int], slices: int = 1) -> list[Collective]:
    """The collectives of a compiled program (`compiled.as_text()`), the heaviest first.

    Args:
      axes: of the mesh, name -> size, in the order of its devices; of several slices its part in
        one of them, for which the program is.
      slices: how many there are.
    """
    computations = Computations(text)
    found: dict[tuple[str, str], Collective] = {}
    for scheduled in computations.walk():
        if between := _between_slices(scheduled, slices):
            found[scheduled.computation, scheduled.instruction.name] = between
        for body, part in _parts(computations, scheduled.instruction):
            kind, started = _KIND.match(part.opcode).groups()
            # One that overlaps with products is a part of several fusions of its computation. A
            # channel by itself is no name: all exchanges of neighbors have the same one.
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
    """A sum, or another collective, over slices: what a device hands to the host for it."""
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
    """Collectives of an instruction: itself, or those inside a fusion, with its name."""
    for body, part in (("", instruction), *computations.inside(instruction)):
        if _KIND.match(part.opcode):
            yield body, part


def _array_bytes(part: Instruction, kind: str, started: bool) -> int:
    shapes = [found[0] for found in SHAPE.finditer(part.shape)]
    sizes = [array_bytes(shape) for shape in shapes]
    if started and kind != "all-reduce":  # (what goes in, what comes out, and some scalars)
        return max(sizes)
    if kind == "reduce-scatter":
        return sum(sizes) * len(next(iter(_groups(part.rest, 1))))
    return sum(sizes)


def _groups(rest: str, devices: int) -> frozenset[frozenset[int]]:
    """Which devices exchange data, by the place in the mesh; all of them where nothing is said."""
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
    """Sets with a common member put together."""
    joined: list[set[int]] = []
    for new in sets:
        touching = [old for old in joined if old & new]
        joined = [old for old in joined if not old & new]
        joined.append(new.union(*touching))
    return joined


def _over(sizes: tuple[int, ...], chosen: list[int]) -> frozenset[frozenset[int]]:
    """Groups of a mesh of `sizes` that differ along the axes `chosen` alone."""
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
