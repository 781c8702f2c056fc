"""Plan of a training step compiled for a TPU slice: memory, cycles, network, time.

All values come from the compiler's output for one device; all devices run the same program.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from convbert_jax.analysis import overview, plans
from convbert_jax.analysis.hlo import (
    BETWEEN_SLICES,
    KINDS,
    Collective,
    Computations,
    find_collectives,
    kernel_bytes,
    scheduled,
)
from convbert_jax.analysis.tpu_devices import Chip, Topology
from convbert_jax.config import Config
from convbert_jax.training.memory import bytes_of_device, spell_bytes, spell_causes
from convbert_jax.training.train_step import TrainState

ASSUMPTIONS = (
    "the compiler's model. Best case: memory at full bandwidth, communication overlapped where "
    "possible. Worst case: the compiler's memory cost, communication not overlapped. Operations "
    "without an estimate (sorts, random bits) are in neither"
)
# Groups of cycles.
PRODUCTS, KERNELS, OTHER = "matrix products", "Pallas kernels", "everything else"
# Named scope of the model or the step -> part; the innermost scope counts.
_PARTS = {
    "convolution": "convolution branch",
    "attention": "attention",
    "mixer": "projections of the mixer",
    "feed_forward": "feed-forward",
    "embeddings": "embeddings and heads",
    "heads": "embeddings and heads",
    "while/body": "stacks of the scan over layers",  # storing and loading stacked arrays
    "loss": "loss and sampling",
    "update": "update",
}
REST, WAITING = "the rest", "collectives waited for"
_SCOPE = re.compile(rf"(?<![^/(])({'|'.join(_PARTS)})(?![^/)])")
_NUMBERED = re.compile(r"([.-](\d+|cloned|call|start))+$")  # the compiler's suffixes of a kind
_PRODUCT = ("convolution", "dot")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Memory of a device in bytes.

    Attributes:
      parameters: parameters of the model.
      optimizer: optimizer state.
      batch: input batch.
      temporaries: activations stored for the backward pass, gradients and temporary buffers.
      program: code.
      capacity: memory available to programs.
      teacher: parameters of config.distillation.teacher.
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
    """Cycles of a step on one device, by the compiler's model.

    Attributes:
      groups: PRODUCTS, KERNELS, OTHER -> cycles. A kernel counts as moving its operands at full
        bandwidth, which is a lower bound.
      parts: part of the model -> cycles, with the same total. A fusion counts for the part of its
        last operation.
      most_expensive: (cycles, executions, name, source name), most expensive first.
      unestimated: kind of operation without an estimate -> number of executions.
    """

    groups: Mapping[str, float]
    parts: Mapping[str, float]
    most_expensive: tuple[tuple[float, int, str, str], ...]
    unestimated: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled step on one mesh."""

    memory: Memory
    operations: Operations
    collectives: tuple[Collective, ...]
    chip: Chip

    @property
    def seconds(self) -> tuple[float, float]:
        """Best and worst case of a step by the compiler's model.

        Best case: products as estimated, other operations at full memory bandwidth, and collectives
        that block the cores, over all links. Worst case: the compiler's pessimistic memory cost,
        and all collectives, over the links of one torus axis or the data-center network. Both
        exclude operations without an estimate, and traffic between slices of unknown bandwidth.
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
        """Cycles by part of the model, and cycles waiting for the network in the best case."""
        seconds = self._waiting / (self.chip.link_bytes_per_second / 2)
        return {**self.operations.parts, WAITING: seconds * self.chip.clock}

    @property
    def _waiting(self) -> float:
        """Bytes that a device sends within its slice while its cores wait."""
        inside = (c for c in self.collectives if c.axes != BETWEEN_SLICES)
        return sum(c.sent_bytes for c in inside if not c.overlapped)

    @property
    def sent_between_slices(self) -> float:
        """Bytes that a device sends to other slices."""
        return sum(c.sent_bytes for c in self.collectives if c.axes == BETWEEN_SLICES)


@dataclasses.dataclass(frozen=True)
class Shortage:
    """A step that does not fit into the memory of a device; bytes per device.

    Attributes:
      needed: total reported by the compiler.
      capacity: memory available to programs.
      parameters: parameters of the model.
      optimizer: optimizer state.
    """

    needed: float
    capacity: float
    parameters: int
    optimizer: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """Plan of one config.

    Attributes:
      axes: mesh axis -> size.
      rows: rows of a batch.
      step: the compiled step, or the shortage if it does not fit.
      kept: bytes per device of activations for the backward pass, by tracing; the compiler may
        rematerialize some of them.
      tokens: tokens of a step over all devices.
      flops: FLOPs of a step over all devices.
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
        """Bytes per device that the step needs."""
        return self.step.memory.used if self.fits else self.step.needed

    @property
    def capacity(self) -> float:
        return self.step.memory.capacity if self.fits else self.step.capacity

    @property
    def fixed(self) -> float:
        """Bytes per device that do not depend on rows.

        Excludes gradients, which do not exist yet at peak memory; `growing` contains them.
        """
        if self.fits:
            return self.used - self.growing
        return self.step.parameters + self.step.optimizer

    @property
    def growing(self) -> float:
        """Bytes per device that grow with rows; an upper bound if the step does not fit.

        In that case the compiler reports the memory at its last attempt, and tracing the
        activations, some of which the compiler would rematerialize.
        """
        if self.fits:
            return self.step.memory.temporaries + self.step.memory.batch
        return max(self.kept, self.used - self.fixed)

    @property
    def seconds(self) -> tuple[float, float]:
        return self.step.seconds

    @property
    def rank(self) -> float:
        """Prefers the fastest step."""
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
    """Reads memory, cycles and collectives from a compiled step.

    Args:
      text: program text from `compile_as_text`.
      state: abstract state with shardings.
      axes: mesh axis -> size.
      slices: number of slices that the data axis spans.
      shown: number of most expensive operations to keep.
      teacher: bytes per device of the teacher's parameters.
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


# The compiler's errors before scheduling, and after no schedule was found.
_SHORTAGES = (
    re.compile(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)"),
    re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm"),
)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def bytes_needed(error: Exception) -> tuple[float, float] | None:
    """Returns (needed, available) bytes if `error` is the compiler's out-of-memory error."""
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
                continue  # collectives are counted by bytes
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
    """Returns the part of the model from the source name of an operation."""
    scopes = _SCOPE.findall(source)
    return _PARTS[scopes[-1]] if scopes else REST


_GIB = 2**30
_WIDTH = 60  # characters of a source name
_SMALL = 1e5  # bytes per step; smaller collectives are not listed


def describe(
    plan: Plan,
    largest: plans.Largest | None,
    compared: Sequence[Plan],
    price: float | None,
) -> str:
    """Formats a plan as text.

    Args:
      largest: result of the batch search, if any.
      compared: plans of other meshes and settings.
      price: price of a chip-hour, in any currency.
    """
    t = plan.topology
    of_slices = f" in {t.slices} slices" if t.slices > 1 else ""
    lines = [
        f"{plan.config.name} on {t.name}: {t.chips} chips{of_slices}; the step was compiled, not "
        "run",
        "",
        f"mesh                    {plans.spell_mesh(plan.axes)}",
        f"step                    {plan.rows:,} rows, {plan.tokens:,} tokens, "
        f"{overview.spell_number(plan.flops)} FLOPs",
        "",
    ]
    if isinstance(plan.step, Shortage):
        lines += _describe_shortage(plan, plan.step)
    else:
        lines += _describe_memory(plan, plan.step)
        lines += _describe_operations(plan.step)
        lines += _describe_network(plan.step)
        lines += _describe_time(plan, plan.step, price)
    if largest:
        lines += _describe_largest(largest)
    if compared:
        lines += _compare([plan, *compared])
    return "\n".join(lines)


def to_json(plan: Plan, price: float | None = None) -> dict[str, Any]:
    """Returns all numbers of a plan for JSON; without time and price if it does not fit.

    Args:
      price: price of a chip-hour, in any currency.
    """
    common = {
        "topology": plan.topology.name,
        "chips": plan.topology.chips,
        "slices": plan.topology.slices,
        "mesh": dict(plan.axes),
        "rows": plan.rows,
        "tokens": plan.tokens,
        "flops": plan.flops,
        "remat": plan.config.model.remat,
        "accumulation": plan.config.train.accumulation,
        "fits": plan.fits,
        "traced_activation_bytes": plan.kept,
    }
    if isinstance(plan.step, Shortage):
        return common | {"memory": dataclasses.asdict(plan.step)}
    step = plan.step
    names = ("cycles", "times", "name", "source")
    return (
        common
        | {
            "memory": dataclasses.asdict(step.memory) | {"used": step.memory.used},
            "cycles": dict(step.operations.groups),
            "cycles_by_part": step.parts,
            "most_expensive": [
                dict(zip(names, row, strict=True)) for row in step.operations.most_expensive
            ],
            "unestimated": dict(step.operations.unestimated),
            "collectives": [
                dataclasses.asdict(each) | {"sent_bytes": each.sent_bytes}
                for each in step.collectives
            ],
        }
        | plans.outlook(plan, price)
    )


def _describe_shortage(plan: Plan, step: Shortage) -> list[str]:
    method = plan.config.optimizer.method
    causes = {
        "parameters": step.parameters,
        "gradients": step.parameters,
        f"moments of {method}": step.optimizer,
        "activations kept for the backward pass": plan.kept,
    }
    return [
        f"DOES NOT FIT: a device needs about {step.needed / _GIB:.1f} GiB and has "
        f"{step.capacity / _GIB:.2f} GiB; by tracing: {spell_causes(causes)}.",
        *plans.WHAT_HELPS,
    ]


def _describe_memory(plan: Plan, step: Step) -> list[str]:
    m = step.memory
    rows = {
        "parameters": (m.parameters, ""),
        f"moments of {plan.config.optimizer.method}": (m.optimizer, ""),
        "temporaries": (
            m.temporaries,
            f"   the backward pass needs {spell_bytes(plan.kept)} of activations, by tracing",
        ),
        "batch and program": (m.batch + m.program, ""),
        **({"teacher's parameters": (m.teacher, "")} if m.teacher else {}),
        "left": (m.left, ""),
    }
    return [
        f"memory of a device      {m.used / _GIB:.2f} of {m.capacity / _GIB:.2f} GiB",
        *(f"  {name:<22}{spell_bytes(size):>10}{note}" for name, (size, note) in rows.items()),
        "",
    ]


def _describe_operations(step: Step) -> list[str]:
    o = step.operations
    whole = sum(o.groups.values())
    notes = {KERNELS: "   lower bound: operands moved at full bandwidth"}
    missing = ", ".join(f"{count} {kind}" for kind, count in o.unestimated.items())
    return [
        f"cycles per step         {whole / 1e6:,.2f} million, by the compiler's model; without an "
        f"estimate: {missing or 'none'}",
        *(
            f"  {name:<22}{cycles / 1e6:>8.2f} {cycles / whole:>5.0%}{notes.get(name, '')}"
            for name, cycles in o.groups.items()
        ),
        "by part of the model, in million cycles",
        *(f"  {name:<26}{cycles / 1e6:>8.2f}" for name, cycles in step.parts.items() if cycles),
        "most expensive operations, in million cycles",
        *(
            f"  {cycles / 1e6:>8.2f}  {times:>3} x {name:<42} {_end_of(source)}"
            for cycles, times, name, source in o.most_expensive
        ),
        "",
    ]


def _end_of(source: str) -> str:
    """Returns the end of a source name, which is its most specific part."""
    return source if len(source) <= _WIDTH else f"…{source[1 - _WIDTH :]}"


def _describe_network(step: Step) -> list[str]:
    sent = sum(c.sent_bytes for c in step.collectives)
    if not sent:
        return ["network                 no traffic", ""]
    sums: dict[tuple[str, str, bool], float] = {}
    for each in step.collectives:
        key = each.kind, each.axes, each.overlapped
        sums[key] = sums.get(key, 0.0) + each.sent_bytes
    rows = sorted(sums.items(), key=lambda row: -row[1])
    lines = [f"network                 {sent / 1e6:,.1f} MB sent per device and step"]
    between = step.sent_between_slices
    if between and step.chip.slice_bytes_per_second is None:
        lines.append(
            f"  {between / 1e6:,.1f} MB of it between slices, whose bandwidth is unknown for these "
            "chips; the times below exclude it"
        )
    for (kind, axes, overlapped), size in rows:
        if size > _SMALL:
            how = "overlapped" if overlapped else "blocking"
            lines.append(f"  {kind + ' over ' + axes:<30}{size / 1e6:>10.1f}   {how}")
    if heavy := _heaviest_wait(step):
        lines.append(
            f"  largest blocking collective: {heavy.kind} of {heavy.array_bytes / 1e6:.1f} MB "
            f"over {heavy.axes}, {heavy.times} times"
        )
    return [*lines, ""]


def _heaviest_wait(step: Step) -> Collective | None:
    waiting = [each for each in step.collectives if not each.overlapped]
    return max(waiting, key=lambda each: each.array_bytes, default=None)


def _describe_time(plan: Plan, step: Step, price: float | None) -> list[str]:
    best, worst = step.seconds
    count = len(plan.topology.devices)
    peak = plan.topology.chip.flops_per_second * count
    shares = sorted(plan.flops / seconds / peak for seconds in (best, worst))
    spelled = [overview.spell_number(share, ".0%") for share in shares]
    steps, run = plan.config.train.steps, plans.outlook(plan, price)
    money = "" if price is None else f", {_range(*run['price'])} at {price:g} each"
    return [
        f"step time               {_range(best * 1e3, worst * 1e3)} ms by {ASSUMPTIONS}",
        f"  tokens per second     {_range(plan.tokens / worst, plan.tokens / best)}",
        f"  MFU                   {' to '.join(dict.fromkeys(spelled))}",
        f"run                     {steps:,} steps: "
        f"{overview.spell_range(best * steps, worst * steps)}, "
        f"{_range(*run['chip_hours'])} chip-hours{money}",
    ]


def _describe_largest(largest: plans.Largest) -> list[str]:
    search = plans.describe_search(largest, "compiled")
    if not largest.next_planned:
        search.append("  it may still fit: the compiler rematerializes more when memory is short")
    if largest.plan is None:
        return ["", "no batch fits", *search]
    rows = largest.plan.rows
    return [
        "",
        f"largest batch found: --config.train.batch_size={rows}, {outcome(largest.plan)}",
        *search,
    ]


def outcome(plan: Plan) -> str:
    """Formats memory per device and the range of step times, or that the step does not fit."""
    memory = f"{plan.used / _GIB:.2f} of {plan.capacity / _GIB:.2f} GiB"
    if not plan.fits:
        return f"needs {memory}: does not fit"
    return f"{memory}, {_range(*(s * 1e3 for s in plan.seconds))} ms"


def _compare(compared: Sequence[Plan]) -> list[str]:
    names = list(map(plans.spell_choice, compared))
    title = "mesh, rematerialization, accumulation"
    width = max(map(len, (*names, title[2:])))
    lines = ["", f"{title:<{width + 2}}{'memory':>10}    {'ms per step':<18} MB sent"]
    for name, each in zip(names, compared, strict=True):
        if isinstance(each.step, Shortage):
            needed = spell_bytes(each.step.needed)
            lines.append(f"  {name:<{width}}{needed:>10}    does not fit")
            continue
        sent = sum(c.sent_bytes for c in each.step.collectives) / 1e6
        times = _range(*(s * 1e3 for s in each.step.seconds))
        used = spell_bytes(each.step.memory.used)
        lines.append(f"  {name:<{width}}{used:>10}    {times:<18} {sent:>7,.0f}")
    fastest = plans.recommend(compared)
    if fastest is None:
        return [*lines, "no plan fits"]
    return [
        *lines, f"fastest by the compiler's model: {plans.flags_of(fastest)}"
    ]  # fmt: skip


def _range(low: float, high: float) -> str:
    return " to ".join(f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in (low, high))
