"""Size and cost of the runs of a sweep, and the text of --plan."""

import collections
import math
from collections.abc import Sequence

import jax

from convbert_jax.analysis import flops, overview, plans
from convbert_jax.analysis.sweep_report import markdown
from convbert_jax.analysis.tpu_devices import CHIPS, count_chips, expand_name, read_shape
from convbert_jax.config import Config, to_text
from convbert_jax.interop import networks
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.runs import effective_config
from convbert_jax.sweeps.table import PRETRAIN, Run, Sweep, Variant


def count_parameters(run: Run, folder: Folder) -> int | None:
    """Trained parameters, generator included; None for fine-tuning, where the weights decide."""
    if run.stage != PRETRAIN:
        return None
    shapes = jax.tree.leaves(networks.abstract_params(_effective(run, folder)))
    return sum(math.prod(leaf.shape) for leaf in shapes)


def count_tokens(run: Run) -> int | None:
    """Tokens that pre-training reads; None for fine-tuning and for text pairs, whose batch sizes
    are known when they are prepared.
    """
    config = run.config
    if run.stage != PRETRAIN or config.reads_pairs:
        return None
    return config.train.steps * config.train.batch_size * config.data.length


def count_flops(run: Run, folder: Folder) -> float | None:
    """Training FLOPs by the convention "model" of `analysis.flops`; None as `count_tokens`."""
    if count_tokens(run) is None:
        return None
    return flops.training_flops(_effective(run, folder))


def _effective(run: Run, folder: Folder) -> Config:
    return effective_config(run.config, run.changes, folder.run(run.id))


def describe_changes(variant: Variant, run: Run) -> str:
    """Changes of a variant as PATH=VALUE, with the steps that it gets in one of its runs."""
    paths = [*(["train.steps"] if variant.match_flops_of else []), *variant.step_fractions]
    changes = {**variant.changes, **{path: run.changes[path] for path in paths}}
    return " ".join(f"{path}={to_text(value)}" for path, value in changes.items())


def describe(
    sweep: Sweep,
    runs: Sequence[Run],
    folder: Folder,
    topology: str = "cpu",
    price: float | None = None,
) -> str:
    """Describes each variant and stage in a line of a table, then the cost of all runs.

    Args:
      topology: devices of a worker, as --mode=plan takes them.
      price: of one chip for one hour, in any currency.

    Raises:
      ConfigError: unknown devices.
    """
    groups: dict[tuple[str, str], list[Run]] = collections.defaultdict(list)
    for run in runs:
        groups[run.variant, run.stage].append(run)
    table, total = [], 0.0
    for (variant, stage), group in groups.items():
        first = group[0]
        records = [folder.read(run.id) for run in group]
        states = collections.Counter(record.state if record else "new" for record in records)
        spent = count_flops(first, folder)
        table.append(
            [
                variant,
                stage,
                _format(count_parameters(first, folder), ",d"),
                _format(count_tokens(first), ".3g"),
                _format(spent, ".3g"),
                ", ".join(f"{count} {state}" for state, count in states.items()),
                first.base if first.after else describe_changes(sweep.variants[variant], first),
            ]
        )
        total += len(group) * (spent or 0.0)
    tokens = sum(count_tokens(run) or 0 for run in runs)
    header = ["variant", "stage", "parameters", "tokens", "FLOPs", "runs", "changes"]
    stages = ", ".join(dict.fromkeys(run.stage for run in runs if run.after))
    seeds = ", ".join(map(str, sweep.seeds))
    lines = [
        *([sweep.purpose, ""] if sweep.purpose else []),
        markdown(header, table, right=(2, 3, 4)),
        "",
        f"{len(runs)} runs: {len(sweep.variants)} variants x seeds ({seeds})"
        + (f"; tasks after each: {stages}." if stages else "."),
    ]
    if tokens:
        lines.append(f"Pre-training: {tokens:.3g} tokens, {_format(total, '.3g')} FLOPs.")
    if total > 0:
        lines.append(_describe_time(total, runs[0].config, topology, price))
    return "\n".join([*lines, f"Baseline: {sweep.reference}. Folder: {folder}."])


def _describe_time(total: float, config: Config, topology: str, price: float | None) -> str:
    """Time and cost of `total` FLOPs of pre-training."""
    chips, best, worst, basis = _read_speed(topology, config)
    times = total / best, total / worst
    text = (
        f"Time of pre-training on {topology}, one run after another: "
        f"{overview.spell_range(*times)} at {basis}, without evaluation and fine-tuning."
    )
    if price is None:
        return text
    costs = dict.fromkeys(f"{time / 3600 * chips * price:,.2f}" for time in times)
    return f"{text} Cost at {price:g} per chip and hour: {' to '.join(costs)}."


def _read_speed(topology: str, config: Config) -> tuple[int, float, float, str]:
    """Returns (number of billed chips, best FLOP/s, worst FLOP/s, basis of the estimate)."""
    if topology == "cpu":
        rows = config.train.batch_size * config.data.length // config.train.accumulation
        cpu = plans.this_cpu(rows, config.model.hidden_size, config.model.ffn_size)
        low, high = cpu.reached
        basis = f"{low:.0%} to {high:.0%} of {cpu.peak / 1e9:,.0f} GFLOP/s (measured)"
        return 1, high * cpu.peak, low * cpu.peak, basis
    if plans.is_counted(topology):
        gpus = plans.read_gpus(topology)
        chips, peak = gpus.count, gpus.count * gpus.peak
    else:
        slices, name = read_shape(expand_name(topology))
        kind = name.partition(":")[0]
        chips = slices * count_chips(name)
        peak = chips * CHIPS[kind].flops_per_second * (2 if kind == "tpu7x" else 1)
    speed = overview.REACHED * peak
    return chips, speed, speed, f"{overview.REACHED:.0%} of peak"


def _format(value: float | None, form: str) -> str:
    return "" if value is None else overview.spell_number(value, form)
