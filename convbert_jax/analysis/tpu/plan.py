"""What a compiled training step will take of a TPU slice: memory, cycles, network, time.

Read off the compiler's output, of one device of the mesh; all of them do the same.
"""

import dataclasses
import re
from collections.abc import Mapping

import jax

from convbert_jax.analysis.tpu.chips import Chip
from convbert_jax.analysis.tpu.collectives import (
    BETWEEN_SLICES,
    KINDS,
    Collective,
    find_collectives,
)
from convbert_jax.analysis.tpu.program import Computations, kernel_bytes, scheduled
from convbert_jax.analysis.tpu.topology import Topology
from convbert_jax.config import Config
from convbert_jax.training.memory import bytes_of_device
from convbert_jax.training.state import TrainState

ASSUMPTIONS = (
    "the compiler's model: at best with memory at full bandwidth and the network hidden where it "
    "can be, at worst with memory as the compiler prices it and all of the network on top; what "
    "has no estimate (sorts, random bits) is in neither"
)
# Groups of cycles, as people ask for them.
PRODUCTS, KERNELS, OTHER = "matrix products", "Pallas kernels", "everything else"
# Scopes of the model and of the step -> what people call them; the innermost one counts.
_PARTS = {
    "convolution": "convolution branch",
    "attention": "attention",
    "mixer": "projections of the mixer",
    "feed_forward": "feed-forward",
    "embeddings": "embeddings and heads",
    "heads": "embeddings and heads",
    "while/body": "stacks of the scan over layers",  # what it keeps and fetches, of no layer itself
    "loss": "loss and sampling",
    "update": "update",
}
REST, WAITING = "the rest", "collectives waited for"
_SCOPE = re.compile(rf"(?<![^/(])({'|'.join(_PARTS)})(?![^/)])")
_NUMBERED = re.compile(r"([.-](\d+|cloned|call|start))+$")  # what the compiler adds to a kind
_PRODUCT = ("convolution", "dot")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of one device.

    Attributes:
      parameters, optimizer, batch: what a step is given.
      temporaries: activations kept for the backward pass, gradients, and what operations need.
      program: the code.
      capacity: that there is.
      teacher: parameters of config.distillation.teacher, which a step is given too.
    """

    parameters: int
    optimizer: int
    batch: int
    temporaries: int
    program: int
    capacity: int
    teacher: int = 0

    @property
    def used(self) -> int:
        given = self.parameters + self.optimizer + self.batch + self.teacher
        return given + self.temporaries + self.program

    @property
    def left(self) -> int:
        return self.capacity - self.used


@dataclasses.dataclass(frozen=True)
class Operations:
    """Cycles of one device and one step, by the compiler's model.

    Attributes:
      groups: PRODUCTS, KERNELS, OTHER -> cycles. A kernel counts as the traffic of its operands at
        full bandwidth, which is less than it takes.
      parts: the same cycles by the part of the model; a fusion of several counts as the one that
        its last operation is of.
      dearest: (cycles, times, name, what the source calls it), the dearest first.
      unestimated: kinds of operations for which the compiler has no estimate -> how many.
    """

    groups: Mapping[str, float]
    parts: Mapping[str, float]
    dearest: tuple[tuple[float, int, str, str], ...]
    unestimated: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """One step on one mesh; `chip` is of a device."""

    memory: Memory
    operations: Operations
    collectives: tuple[Collective, ...]
    chip: Chip

    @property
    def seconds(self) -> tuple[float, float]:
        """Of a step, at best and at worst by the compiler's model.

        At best: products as estimated, all else at the full bandwidth of the memory, and of the
        network only what the cores wait for, over all links. At worst: memory as pessimistically as
        the compiler prices it, and all of the network, over the links of one axis of the torus and
        between slices over the data center's. Both leave out what the compiler has no estimate for,
        and what goes between slices of chips whose network there is not known.
        """
        groups, chip = self.operations.groups, self.chip
        best = groups[PRODUCTS] + groups[KERNELS] + groups[OTHER] / chip.memory_pessimism
        worst = sum(groups.values())
        inside = [c for c in self.collectives if c.axes != BETWEEN_SLICES]
        waiting = self._waiting
        hidden = sum(c.sent_bytes for c in inside) - waiting
        one_way = chip.link_bytes_per_second / 2
        of_one_axis = one_way * 2 / chip.ports
        between = 0.0
        if chip.slice_bytes_per_second is not None:
            between = self.sent_between_slices / chip.slice_bytes_per_second
        return (
            best / chip.clock + waiting / one_way,
            worst / chip.clock + (waiting + hidden) / of_one_axis + between,
        )

    @property
    def parts(self) -> dict[str, float]:
        """Cycles by part of the model, and those in which cores wait for the network at best."""
        seconds = self._waiting / (self.chip.link_bytes_per_second / 2)
        return {**self.operations.parts, WAITING: seconds * self.chip.clock}

    @property
    def _waiting(self) -> float:
        """Bytes that a device sends inside its slice while its cores wait."""
        inside = (c for c in self.collectives if c.axes != BETWEEN_SLICES)
        return sum(c.sent_bytes for c in inside if not c.overlapped)

    @property
    def sent_between_slices(self) -> float:
        """Bytes of a device."""
        return sum(c.sent_bytes for c in self.collectives if c.axes == BETWEEN_SLICES)


@dataclasses.dataclass(frozen=True)
class Shortage:
    """A step that does not fit into the memory of a device, in bytes of it.

    Attributes:
      needed: of all, as the compiler says; capacity: that there are.
      parameters, optimizer: what a step is given.
    """

    needed: float
    capacity: float
    parameters: int
    optimizer: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """What came out for one config.

    Attributes:
      axes: of the mesh, name -> size.
      rows: of a batch.
      step: what it takes, or why there is none.
      kept: bytes of activations of one device that the backward pass asks for, by tracing; the
        compiler may compute some of them again.
      tokens, flops: of a step, of all devices.
    """

    config: Config
    topology: Topology
    axes: Mapping[str, int]
    rows: int
    step: Step | Shortage
    kept: int
    tokens: int
    flops: float

    @property
    def fits(self) -> bool:
        return isinstance(self.step, Step)

    @property
    def used(self) -> float:
        """Bytes of a device."""
        return self.step.memory.used if self.fits else self.step.needed

    @property
    def capacity(self) -> float:
        return self.step.memory.capacity if self.fits else self.step.capacity

    @property
    def fixed(self) -> float:
        """Gradients are in `growing`: where memory is fullest there are none yet."""
        if self.fits:
            return self.used - self.growing
        return self.step.parameters + self.step.optimizer

    @property
    def growing(self) -> float:
        """Of what does not fit the compiler tells what was left when it gave up; tracing, what the
        backward pass asks for, of which the compiler keeps less.
        """
        if self.fits:
            return self.step.memory.temporaries + self.step.memory.batch
        return max(self.kept, self.used - self.fixed)

    @property
    def seconds(self) -> tuple[float, float]:
        return self.step.seconds

    @property
    def rank(self) -> float:
        """The fastest is the best."""
        return sum(self.seconds)

    @property
    def paid(self) -> int:
        return self.topology.chips

    @property
    def assumptions(self) -> str:
        return ASSUMPTIONS


def describe_step(
    compiled: jax.stages.Compiled,
    text: str,
    state: TrainState,
    chip: Chip,
    axes: Mapping[str, int],
    slices: int = 1,
    shown: int = 12,
    *,
    teacher: int = 0,
) -> Step:
    """Reads a compiled step.

    Args:
      text: the program, as `compile_as_text` gives it.
      state: abstract, with its places.
      axes: of the mesh, name -> size.
      slices: that its data axis goes over.
      shown: how many of the dearest operations are kept.
      teacher: bytes of a device of what is given to a step besides.
    """
    stats = compiled.memory_analysis()
    parameters, optimizer = (bytes_of_device(t) for t in (state.params, state.opt_state))
    memory = Memory(
        parameters=parameters,
        optimizer=optimizer,
        batch=stats.argument_size_in_bytes - parameters - optimizer - teacher,
        temporaries=stats.temp_size_in_bytes
        + stats.output_size_in_bytes
        - stats.alias_size_in_bytes,
        program=stats.generated_code_size_in_bytes,
        capacity=int(chip.hbm_bytes),
        teacher=teacher,
    )
    return Step(
        memory=memory,
        operations=_count_operations(text, chip, shown),
        collectives=tuple(find_collectives(text, {**axes, "data": axes["data"] // slices}, slices)),
        chip=chip,
    )


# What the compiler says before it begins, and when it has found no schedule.
_SHORTAGES = (
    re.compile(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def bytes_needed(error: Exception) -> tuple[float, float] | None:
    """(needed, there are) bytes, if `error` is the compiler's that memory does not suffice."""
    for pattern in _SHORTAGES:
        if found := pattern.search(str(error)):
            needed, unit, capacity, of_capacity = found.groups()
            return float(needed) * 2 ** _POWERS[unit], float(capacity) * 2 ** _POWERS[of_capacity]
    return None


def _count_operations(text: str, chip: Chip, shown: int) -> Operations:
    computations = Computations(text)
    multiplies = {
        found.instruction.name
        for found in computations.walk()
        if found.instruction.opcode in _PRODUCT
        or any(p.opcode in _PRODUCT for _, p in computations.inside(found.instruction))
    }
    groups = {PRODUCTS: 0.0, KERNELS: 0.0, OTHER: 0.0}
    parts = dict.fromkeys([*_PARTS.values(), REST], 0.0)
    rows, unestimated = [], {}
    for operation in scheduled(text):
        cycles = operation.cycles
        if operation.kernel is not None:
            cycles, group = chip.bandwidth_cycles(kernel_bytes(operation.kernel)), KERNELS
        elif cycles is None:
            kind = _NUMBERED.sub("", operation.name)
            if kind in KINDS:
                continue  # the network is counted by bytes
            unestimated[kind] = unestimated.get(kind, 0) + operation.times
            continue
        else:
            group = PRODUCTS if operation.name in multiplies else OTHER
        groups[group] += operation.times * cycles
        parts[_part(operation.source)] += operation.times * cycles
        rows.append((operation.times * cycles, operation.times, operation.name, operation.source))
    rows.sort(reverse=True)
    return Operations(groups, parts, tuple(rows[:shown]), unestimated)


def _part(source: str) -> str:
    """Of the model, by what the program calls an operation."""
    scopes = _SCOPE.findall(source)
    return _PARTS[scopes[-1]] if scopes else REST
