"""Overview of a config by arithmetic: parameters, tokens, FLOPs, memory."""

import math
from collections.abc import Collection

import jax

from convbert_jax.analysis import flops
from convbert_jax.config import Config, describe_fields
from convbert_jax.config.lengths import find_texts, hours_of
from convbert_jax.training import partitioning
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.training.partitioning import Params

# Chips with a time estimate (keys of `flops.PEAK_FLOPS`), and an MFU that large runs of such models
# reach. It was not measured with this package.
_CHIPS = ("TPU v4", "TPU v5e", "TPU v6e", "A100", "H100")
REACHED = 0.3
_PLANS = (
    "For activations and the time of a step, use --mode=plan --topology=cpu (this machine), "
    "gpu:h100x1 or v5e:2x2."
)


def describe_tasks(config: Config, params: Params, leave_out: Collection[str] = ()) -> str:
    """Formats a fine-tuning config as `describe_run` does; `params` is without heads."""
    return "\n".join(_describe_size(config, params, leave_out) + _describe_tasks(config))


def describe_run(config: Config, params: Params, leave_out: Collection[str] = ()) -> str:
    """Formats all fields, then parameters, memory and cost of the run.

    Memory covers parameters, gradients and optimizer state in float32, not activations.

    Args:
      params: parameters of the model, or their shapes.
      leave_out: sections and fields that the recipe does not read.
    """
    lines = _describe_size(config, params, leave_out)
    if config.distillation.teacher:
        lines.append(
            "teacher                     its parameters and forward pass are not included in these "
            "numbers"
        )
    return "\n".join([*lines, *_describe_run(config), "", _PLANS])


def _describe_size(config: Config, params: Params, leave_out: Collection[str]) -> list[str]:
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
    return [
        *lines,
        "",
        f"memory without activations  {_bytes(size)} ({config.optimizer.method}, float32), divided "
        "by config.mesh.fsdp",
    ]


def count_parts(params: Params) -> dict[str, int]:
    """Counts the parameters of each part of a model."""
    return {name: partitioning.count_params(part) for name, part in params.items()}


def _describe_run(config: Config) -> list[str]:
    t = config.train
    most = ""
    source = config.training_data.source or f"config.{config.spec.data}.source is not set"
    tokens = config.spec.tokens_per_step(config)
    if varies := tokens is None:
        most, tokens = "at most ", 2 * config.parallel.batch_tokens
        rows = f"{most}{tokens:,} tokens, source and target"
    else:
        rows = f"{t.batch_size:,} rows x {config.data.length:,} = {tokens:,} tokens"
        mixture = [f"{s.weight:.3g} {s.name} ({s.source})" for s in config.data.mixture]
        source = ", ".join(mixture) or source
    lines = [
        "",
        f"training data               {source}",
        f"step                        {rows}",
    ]
    if texts := list(find_texts(config)):
        of_run = ", ".join(f"{field}={text}" for field, text in texts)
        known = "--mode=prepare" if hours_of(config) is None else "the run has started"
        return [*lines, f"run                         {of_run}; steps are known after {known}"]
    seen = t.steps * tokens
    if config.phases:
        phases = zip(config.phase_configs, config.phase_lengths, strict=True)
        seen = sum(n * each.train.batch_size * each.data.length for each, n in phases)
    lines += [
        *describe_phases(config),
        f"run                         {t.steps:,} steps, {most}{_count(seen)} tokens",
        f"evaluations, checkpoints    every {t.eval_every:,} and {config.checkpoint.every:,} steps",
    ]
    if varies:
        return lines
    work = tokens * flops.training_flops_per_token(config)
    total = flops.training_flops(config)
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


def describe_phases(config: Config) -> list[str]:
    """Returns a line for each phase, whose lengths are numbers of steps; [] without phases."""
    lines = []
    for phase, of_phase in zip(config.phases, config.phase_configs, strict=bool(config.phases)):
        rows, length = of_phase.train.batch_size, of_phase.data.length
        rate = phase.learning_rate or config.optimizer.learning_rate
        facts = [
            f"{phase.length:,} steps of {rows:,} x {length:,} = "
            f"{_count(phase.length * rows * length)} tokens",
            f"learning rate {rate:g} {phase.schedule}",
            f"{of_phase.objective.mask_fraction:.0%} masked",
        ]
        names = [source.name for source in config.data.mixture]
        shares = zip(phase.weights, names, strict=False)
        facts += [" ".join(f"{weight:.3g} {name}" for weight, name in shares)]
        lines.append(f"phase {phase.name:<21} {', '.join(filter(None, facts))}")
    return lines


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
