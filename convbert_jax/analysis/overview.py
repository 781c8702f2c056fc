"""Overview of a config by arithmetic: parameters, tokens, FLOPs, memory."""

import math
from collections.abc import Collection

import jax

from convbert_jax.analysis import flops
from convbert_jax.config import Config, describe_fields
from convbert_jax.training import partitioning
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.training.partitioning import Params

# Chips with a time estimate (keys of `flops.PEAK_FLOPS`), and an MFU that large runs of such models
# reach (docs/pretraining.md). It was not measured with this package.
_CHIPS = ("TPU v4", "TPU v5e", "TPU v6e", "A100", "H100")
REACHED = 0.3
_PLANS = (
    "For activations and the time of a step, use --mode=plan --topology=cpu (this machine), "
    "gpu:h100x1 or v5e:2x2."
)


def describe(config: Config, params: Params, leave_out: Collection[str] = ()) -> str:
    """Formats all fields, then parameters, memory and cost of the run.

    Memory covers parameters, gradients and optimizer state in float32, not activations.

    Args:
      params: parameters of the model, or their shapes.
      leave_out: sections and fields that the recipe does not read.
    """
    if config.recipe == "finetune":  # each task has its own head
        params = {name: part for name, part in params.items() if name != "head"}
    parts = count_parts(params)
    whole = sum(parts.values())
    lines = [
        *describe_fields(config, leave_out),
        "",
        f"{config.name}: config.recipe={config.recipe}",
        "",
        "parameters",
    ]
    lines += [f"  {name:<28}{count:>15,}" for name, count in parts.items()]
    lines += [f"  {'all':<28}{whole:>15,}"]
    moments = jax.eval_shape(make_optimizer(config.optimizer, config.train.steps).init, params)
    size = 2 * 4 * whole + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(moments))
    lines += [
        "",
        f"memory without activations  {_bytes(size)} ({config.optimizer.method}, float32), divided "
        "by config.mesh.fsdp",
    ]
    if config.recipe == "finetune":
        return "\n".join([*lines, *_describe_tasks(config)])
    if config.distillation.teacher:
        lines.append(
            "teacher                     its parameters and forward pass are not included in these "
            "numbers"
        )
    return "\n".join([*lines, *_describe_run(config), "", _PLANS])


def count_parts(params: Params) -> dict[str, int]:
    """Counts the parameters of each part of a model."""
    return {name: partitioning.count_params(part) for name, part in params.items()}


def _describe_run(config: Config) -> list[str]:
    t = config.train
    most = ""
    if config.reads_pairs:
        most, tokens = "at most ", 2 * config.parallel.batch_tokens
        rows = f"{most}{tokens:,} tokens, source and target"
        source = config.parallel.source or "config.parallel.source is not set"
    else:
        tokens = t.batch_size * config.data.length
        rows = f"{t.batch_size:,} rows x {config.data.length:,} = {tokens:,} tokens"
        source = config.data.source
    lines = [
        "",
        f"training data               {source}",
        f"step                        {rows}",
        f"run                         {t.steps:,} steps, {most}{_count(t.steps * tokens)} tokens",
        f"evaluations, checkpoints    every {t.eval_every:,} and {config.checkpoint.every:,} steps",
    ]
    if config.reads_pairs:
        return lines
    work = tokens * flops.training_flops_per_token(config)
    total = work * t.steps
    lines += [
        f"operations                  {spell_number(work)} FLOPs per step, {spell_number(total)} "
        "in total",
    ]
    if math.isnan(work):
        return lines
    lines += [
        "",
        f"time on one chip at {REACHED:.0%} of its peak (arithmetic, not a measurement):",
    ]
    rates = {chip: flops.PEAK_FLOPS[chip] * REACHED for chip in _CHIPS}
    return lines + [
        f"  {chip:<26}{spell_time(total / rate)}, {tokens * rate / work:,.0f} tokens/s"
        for chip, rate in rates.items()
    ]


def _describe_tasks(config: Config) -> list[str]:
    f = config.finetune
    return [
        "",
        f"tasks                       {', '.join(f.tasks)}",
        f"runs per task               {max(1, len(f.learning_rates))} learning rates x "
        f"{max(1, len(f.epochs))} numbers of epochs x {f.seeds} seeds",
        f"initial weights             {config.init_from or 'random'}",
    ]


def _bytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if float(f"{number:.3g}") >= size:  # 999,999 is 1 M
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def spell_number(value: float, form: str = ".3g") -> str:
    """Formats a number; NaN is "unknown"."""
    return "unknown" if math.isnan(value) else format(value, form)


def spell_range(best: float, worst: float) -> str:
    """Formats two durations in seconds as "3.2 days to 5.1 days", or as one if they look equal."""
    return " to ".join(dict.fromkeys(map(spell_time, (best, worst))))


def spell_time(seconds: float) -> str:
    """Formats a duration in seconds as "3.2 days"; NaN is "unknown"."""
    if math.isnan(seconds):
        return "unknown"
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"
