"""The cells of a sweep as a text: what each changes, how large it is, what it costs."""

import collections
import math
from collections.abc import Sequence

import jax

from convbert_jax.analysis import arithmetic_plan, flops, overview
from convbert_jax.analysis.tpu.chips import CHIPS, count_chips
from convbert_jax.analysis.tpu.topology import expand_name, read_shape
from convbert_jax.config import Config, to_text
from convbert_jax.interop import networks
from convbert_jax.sweeps.cells import PRETRAIN, Cell
from convbert_jax.sweeps.checks.files import as_it_runs
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.table import Row, Sweep


def count_parameters(cell: Cell, folder: Folder) -> int | None:
    """Trained parameters, generator included; None of fine-tuning, where the weights say it."""
    if cell.stage != PRETRAIN:
        return None
    shapes = jax.tree.leaves(networks.abstract_params(_as_it_runs(cell, folder)))
    return sum(math.prod(leaf.shape) for leaf in shapes)


def count_tokens(cell: Cell) -> int | None:
    """Tokens of rows that pre-training reads; None of fine-tuning, and of pairs of texts, whose
    batches are known when they are prepared.
    """
    config = cell.config
    if cell.stage != PRETRAIN or config.reads_pairs:
        return None
    return config.train.steps * config.train.batch_size * config.data.length


def count_flops(cell: Cell, folder: Folder) -> float | None:
    """Training FLOPs, by the convention "model" of `analysis.flops`; None as `count_tokens`."""
    if count_tokens(cell) is None:
        return None
    return flops.training_flops(_as_it_runs(cell, folder))


def _as_it_runs(cell: Cell, folder: Folder) -> Config:
    return as_it_runs(cell.config, cell.changed, folder.run(cell.id))


def describe_changes(row: Row, cell: Cell) -> str:
    """What a row changes, PATH=VALUE, with what follows for one of its cells: steps."""
    follows = [*(["train.steps"] if row.flops_of else []), *row.parts]
    changes = {**row.changes, **{path: cell.changed[path] for path in follows}}
    return " ".join(f"{path}={to_text(value)}" for path, value in changes.items())


def describe(
    sweep: Sweep,
    cells: Sequence[Cell],
    folder: Folder,
    topology: str = "cpu",
    price: float | None = None,
) -> str:
    """A line for each row and stage, with the state of its cells; then what all cost together.

    Args:
      topology: the devices of a runner, as --mode=plan takes them.
      price: of an hour of one chip, in any currency.

    Raises:
      ConfigError: no such devices.
    """
    groups: dict[tuple[str, str], list[Cell]] = collections.defaultdict(list)
    for cell in cells:
        groups[cell.row, cell.stage].append(cell)
    table = [["row", "stage", "parameters", "tokens", "FLOPs", "cells", "changes"]]
    total = 0.0
    for (row, stage), group in groups.items():
        first = group[0]
        states = collections.Counter(_state(folder, cell) for cell in group)
        table.append(
            [
                row,
                stage,
                _show(count_parameters(first, folder), ",d"),
                _show(count_tokens(first), ".3g"),
                _show(of_row := count_flops(first, folder), ".3g"),
                ", ".join(f"{count} {state}" for state, count in states.items()),
                first.base if first.after else describe_changes(sweep.rows[row], first),
            ]
        )
        total += len(group) * (of_row or 0.0)
    widths = [max(len(line[place]) for line in table) for place in range(len(table[0]))]
    lines = [
        "  ".join(
            text.rjust(width) if place in (2, 3, 4) else text.ljust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]
    tokens = sum(count_tokens(cell) or 0 for cell in cells)
    stages = dict.fromkeys(cell.stage for cell in cells if cell.after)
    seeds = ", ".join(map(str, sweep.seeds))
    return "\n".join(
        [
            *([sweep.purpose, ""] if sweep.purpose else []),
            *lines,
            "",
            f"{len(cells)} cells: {len(sweep.rows)} rows x seeds ({seeds})"
            + (f", after each {', '.join(stages)}" if stages else "")
            + (
                f"; {tokens:.3g} tokens, {_show(total, '.3g')} FLOPs of pre-training."
                if tokens
                else "."
            ),
            *([_describe_time(total, cells[0].config, topology, price)] if total > 0 else []),
            f"Compared with: {sweep.compared_with}. Folder: {folder}.",
        ]
    )


def _describe_time(total: float, config: Config, topology: str, price: float | None) -> str:
    """Time and cost of pre-training of `total` FLOPs, a sentence each."""
    chips, best, worst, basis = _read_speed(topology, config)
    times = total / best, total / worst
    text = (
        f"Pre-training takes {overview.spell_range(*times)} on {topology}, one cell after another, "
        f"if it reaches {basis} (arithmetic, without evaluations and fine-tuning)."
    )
    if price is None:
        return text
    costs = dict.fromkeys(f"{time / 3600 * chips * price:,.2f}" for time in times)
    return f"{text} At {price:g} for a chip and hour it costs {' to '.join(costs)}."


def _read_speed(topology: str, config: Config) -> tuple[int, float, float, str]:
    """(chips that are paid for, FLOP/s at best, at worst, what they rest on)."""
    if topology == "cpu":
        rows = config.train.batch_size * config.data.length // config.train.accumulation
        cpu = arithmetic_plan.this_cpu(rows, config.model.hidden_size, config.model.ffn_size)
        low, high = cpu.reached
        basis = f"{low:.0%} to {high:.0%} of {cpu.peak / 1e9:,.0f} GFLOP/s, measured just now"
        return 1, high * cpu.peak, low * cpu.peak, basis
    if arithmetic_plan.is_counted(topology):
        gpus = arithmetic_plan.read_gpus(topology)
        chips, peak = gpus.count, gpus.count * gpus.peak
    else:
        slices, name = read_shape(expand_name(topology))
        kind = name.partition(":")[0]
        chips = slices * count_chips(name)
        peak = chips * CHIPS[kind].flops_per_second * (2 if kind == "tpu7x" else 1)
    speed = overview.REACHED * peak
    return chips, speed, speed, f"{overview.REACHED:.0%} of its peak"


def _state(folder: Folder, cell: Cell) -> str:
    record = folder.read(cell.id)
    return record.state if record else "new"


def _show(value: float | None, form: str) -> str:
    return "" if value is None else overview.spell_number(value, form)
