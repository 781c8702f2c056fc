"""Plans for TPUs as text and JSON."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from convbert_jax.analysis import overview, planned
from convbert_jax.analysis.tpu.collectives import Collective
from convbert_jax.analysis.tpu.plan import ASSUMPTIONS, KERNELS, Plan, Shortage, Step
from convbert_jax.training.memory import spell_bytes, spell_causes

_GIB = 2**30
_WIDTH = 60  # characters of a source name
_SMALL = 1e5  # bytes per step; smaller collectives are not listed


def describe(
    plan: Plan,
    largest: planned.Largest | None,
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
        f"mesh                    {planned.spell_mesh(plan.axes)}",
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
            "dearest": [dict(zip(names, row, strict=True)) for row in step.operations.dearest],
            "unestimated": dict(step.operations.unestimated),
            "collectives": [
                dataclasses.asdict(each) | {"sent_bytes": each.sent_bytes}
                for each in step.collectives
            ],
        }
        | planned.outlook(plan, price)
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
        *planned.WHAT_HELPS,
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
            for cycles, times, name, source in o.dearest
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
    steps, run = plan.config.train.steps, planned.outlook(plan, price)
    money = "" if price is None else f", {_range(*run['price'])} at {price:g} each"
    return [
        f"step time               {_range(best * 1e3, worst * 1e3)} ms by {ASSUMPTIONS}",
        f"  tokens per second     {_range(plan.tokens / worst, plan.tokens / best)}",
        f"  MFU                   {' to '.join(dict.fromkeys(spelled))}",
        f"run                     {steps:,} steps: "
        f"{overview.spell_range(best * steps, worst * steps)}, "
        f"{_range(*run['chip_hours'])} chip-hours{money}",
    ]


def _describe_largest(largest: planned.Largest) -> list[str]:
    search = planned.describe_search(largest, "compiled")
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


def _compare(plans: Sequence[Plan]) -> list[str]:
    names = list(map(planned.spell_choice, plans))
    title = "mesh, rematerialization, accumulation"
    width = max(map(len, (*names, title[2:])))
    lines = ["", f"{title:<{width + 2}}{'memory':>10}    {'ms per step':<18} MB sent"]
    for name, each in zip(names, plans, strict=True):
        if isinstance(each.step, Shortage):
            needed = spell_bytes(each.step.needed)
            lines.append(f"  {name:<{width}}{needed:>10}    does not fit")
            continue
        sent = sum(c.sent_bytes for c in each.step.collectives) / 1e6
        times = _range(*(s * 1e3 for s in each.step.seconds))
        used = spell_bytes(each.step.memory.used)
        lines.append(f"  {name:<{width}}{used:>10}    {times:<18} {sent:>7,.0f}")
    fastest = planned.recommend(plans)
    if fastest is None:
        return [*lines, "no plan fits"]
    return [
        *lines, f"fastest by the compiler's model: {planned.flags_of(fastest)}"
    ]  # fmt: skip


def _range(low: float, high: float) -> str:
    return " to ".join(f"{n:,.0f}" if n >= 100 else f"{n:.3g}" for n in (low, high))
