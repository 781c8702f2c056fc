"""What a config comes to, by arithmetic: parameters, tokens, operations, memory."""

import math
from collections.abc import Collection

import jax

from convbert_jax.analysis import flops
from convbert_jax.config import Config, describe_fields
from convbert_jax.training import state
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.training.task import Params

# Chips to name a time for, by a part of `device_kind`; at a share of their peak that large runs of
# such models reach (docs/pretraining.md), not one that was measured here.
_CHIPS = ("TPU v4", "TPU v5e", "TPU v6e", "A100", "H100")
REACHED = 0.3
_PLANS = (
    "With activations, and the time of a step: --mode=plan --topology=cpu (this machine), "
    "gpu:h100x1 or v5e:2x2."
)


def describe(config: Config, params: Params, leave_out: Collection[str] = ()) -> str:
    """A text for a person: every field, then a line for each of what they decide.

    Args:
      params: of the model, or their shapes alone.
      leave_out: sections and fields that the recipe does not read.

    Memory is of what does not depend on the batch:
    parameters, gradients and the optimizer's moments in float32; activations come on top.
    """
    if config.recipe == "finetune":  # each task has a head of its own
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
        f"memory beside activations   {_bytes(size)} ({config.optimizer.method}, float32), divided "
        "by config.mesh.fsdp",
    ]
    if config.recipe == "finetune":
        return "\n".join([*lines, *_describe_tasks(config)])
    if config.distillation.teacher:
        lines.append(
            "the teacher                its parameters and its forward pass come on top of all "
            "numbers here"
        )
    return "\n".join([*lines, *_describe_run(config), "", _PLANS])


def count_parts(params: Params) -> dict[str, int]:
    """How many numbers each part of a model learns."""
    return {name: state.count(part) for name, part in params.items()}


def _describe_run(config: Config) -> list[str]:
    t = config.train
    most = ""
    if config.reads_pairs:
        most, tokens = "at most ", 2 * config.parallel.batch_tokens
        rows = f"{most}{tokens:,} tokens of both texts, by their lengths"
        source = config.parallel.source or "config.parallel.source is not named yet"
    else:
        tokens = t.batch_size * config.data.length
        rows = f"{t.batch_size:,} rows x {config.data.length:,} = {tokens:,} tokens"
        source = config.data.source
    lines = [
        "",
        f"learns from                 {source}",
        f"a step                      {rows}",
        f"the run                     {t.steps:,} steps, {most}{_count(t.steps * tokens)} tokens",
        f"evaluations, checkpoints    every {t.eval_every:,} and {config.checkpoint.every:,} steps",
    ]
    if config.reads_pairs:
        return lines
    work = tokens * flops.training_flops_per_token(config)
    total = work * t.steps
    lines += [
        f"operations                  {spell_number(work)} FLOPs a step, {spell_number(total)} in "
        "all",
    ]
    if math.isnan(work):
        return lines
    lines += [
        "",
        f"one chip, if it reached {REACHED:.0%} of its peak (arithmetic, not a measurement):",
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
        f"runs of each                {max(1, len(f.learning_rates))} learning rates x "
        f"{max(1, len(f.epochs))} numbers of epochs x {f.seeds} seeds",
        f"starts from                 {config.init_from or 'random weights'}",
    ]


def _bytes(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if float(f"{number:.3g}") >= size:  # 999,999 are 1 M
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def spell_number(value: float, form: str = ".3g") -> str:
    """`value` as `format` writes it, "unknown" for NaN."""
    return "unknown" if math.isnan(value) else format(value, form)


def spell_range(best: float, worst: float) -> str:
    """As "3.2 days to 5.1 days"; of seconds that round to the same, that."""
    return " to ".join(dict.fromkeys(map(spell_time, (best, worst))))


def spell_time(seconds: float) -> str:
    """As "3.2 days"; "unknown" for NaN."""
    if math.isnan(seconds):
        return "unknown"
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{math.ceil(seconds)} s"
