"""Expands a sweep into runs, checks them, and describes their size and cost."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from convbert_jax import config_files, recipes
from convbert_jax.analysis import flops, overview, plans
from convbert_jax.analysis.sweep_report import markdown
from convbert_jax.analysis.tpu_devices import CHIPS, count_chips, expand_name, read_shape
from convbert_jax.config import (
    Config,
    ModelSection,
    UserError,
    changes,
    from_config_dict,
    lengths,
    to_dict,
    to_text,
)
from convbert_jax.interop import networks
from convbert_jax.sweeps.table import (
    FINETUNE,
    FINISHED,
    PRETRAIN,
    SCRATCH,
    Folder,
    Run,
    Sweep,
    SweepError,
    Task,
    Variant,
)
from convbert_jax.workdir import Workdir

# Fields that may change in a single run, but not within a sweep, whose runs are compared.
_COMPARED = (
    *("train.steps", "train.log_every", "train.eval_every", "train.eval_rows"),
    *("train.gradient_dtype", "compute_dtype", "finetune.tasks", "finetune.seeds"),
    "distillation.teacher",
)
_DECODING, _DECODING_SPEED = "decoding.", "decoding.batch_tokens"
# Overrides of a sweep with tasks apply to pre-training, except these.
_TASK_FIELDS = ("finetune.", "task.", "parallel.", "decoding.")
_SHARED_FIELDS = ("platform", "compute_dtype", "mesh.", "train.compile_cache")
_ADD_TASK = "Add --finetune='text:trec --config.task.folder=FOLDER'."


def expand(sweep: Sweep, folder: Folder, overrides: Mapping[str, Any] | None = None) -> list[Run]:
    """Returns all runs, seed by seed, each pre-training run before its tasks.

    Args:
      overrides: field path -> value, for all runs; in a sweep with tasks, the sections
        `finetune`, `task`, `parallel` and `decoding` apply to the tasks.

    Raises:
      SweepError: an invalid variant, task or override.
    """
    overrides = dict(overrides or {})
    _check_overrides(sweep, overrides)
    pretraining, tasks = _split_overrides(sweep, overrides)
    runs = []
    variants = {name: _variant_changes(sweep, folder, name, pretraining) for name in sweep.variants}
    for seed in sweep.seeds:
        for name, changed in variants.items():
            runs += _expand_variant(sweep, folder, name, {**changed, "seed": seed}, tasks)
    _check_task_overrides(sweep, runs[0].config, overrides)
    _check_distinct(runs)
    _check_data_folder(runs, folder, pretraining)
    return runs


def make_config(what: str, base: str, changed: Mapping[str, Any]) -> Config:
    """Makes a config; raises SweepError, which names `what`, if it is invalid."""
    try:
        return config_files.make_config(base, dict(changed))
    except UserError as error:
        raise _named(what, error) from error


def _named(what: str, error: UserError) -> SweepError:
    parts = {name: getattr(error, name) for name in ("field", "value", "path", "line")}
    return SweepError(f"{what}: {error}" if what else str(error), **parts)


def _make_variant(sweep: Sweep, name: str, changed: Mapping[str, Any]) -> Config:
    """Makes the config of a variant, with lengths in steps; an error of all variants alike does not
    name the variant.
    """

    def make(fields: Mapping[str, Any]) -> Config:
        config = config_files.make_config(sweep.config, dict(fields))
        return lengths.to_steps(config, lengths.tokens_of_step)

    try:
        return make(changed)
    except UserError as error:
        own = sweep.variants[name].changes
        others = {path: value for path, value in changed.items() if path not in own}
        try:
            make({**sweep.changes, **others})
        except UserError as other:
            if str(other) == str(error):
                raise _named("", error) from error
        raise _named(f"variant {name}", error) from error


def _check_overrides(sweep: Sweep, overrides: Mapping[str, Any]) -> None:
    if sweep.from_scratch and not sweep.tasks:
        raise SweepError(f"This sweep needs a task. {_ADD_TASK}", field="--finetune")
    for path in overrides.keys() & sweep.varied_fields():
        fix = "Use --seeds=N" if path == "seed" else "Remove the override"
        raise SweepError(f"already varies between the runs. {fix}.", field=f"--config.{path}")


def _check_task_overrides(sweep: Sweep, first: Config, overrides: Mapping[str, Any]) -> None:
    """Refuses overrides that no task would use."""
    for path in overrides:
        if not sweep.tasks and first.recipe != FINETUNE and path.startswith(_TASK_FIELDS[:2]):
            raise SweepError(
                f"applies to tasks, but this sweep has none. {_ADD_TASK}", field=f"--config.{path}"
            )
        tasks = sweep.tasks.values()
        if tasks and path.startswith(_TASK_FIELDS) and all(path in task.changes for task in tasks):
            raise SweepError("has no effect: every task sets it.", field=f"--config.{path}")


def _split_overrides(sweep: Sweep, overrides: Mapping[str, Any]) -> tuple[dict, dict]:
    """Returns (overrides of pre-training, overrides of the tasks)."""
    if not sweep.tasks:
        return dict(overrides), {}
    of_tasks = {p: v for p, v in overrides.items() if p.startswith(_TASK_FIELDS)}
    shared = {p: v for p, v in overrides.items() if p.startswith(_SHARED_FIELDS)}
    return {p: v for p, v in overrides.items() if p not in of_tasks}, of_tasks | shared


def _variant_changes(
    sweep: Sweep, folder: Folder, name: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the changes of a variant, with the number of steps that `match_flops_of` gives."""
    variant = sweep.variants[name]
    changed = {**sweep.changes, **overrides, **variant.changes}
    config = _make_variant(sweep, name, changed)
    if not variant.match_flops_of:
        return changed
    other = _variant_changes(sweep, folder, variant.match_flops_of, overrides)
    reference = _make_variant(sweep, variant.match_flops_of, other)
    reason = _no_flops(config) or _no_flops(reference)
    if first := config.objective.masked_lm_steps:
        reason = f"the first config.objective.masked_lm_steps={first} steps have other FLOPs"
    wanted = spent = math.nan
    if not reason:
        reason = f"those of config.model.mixer={config.model.mixer} are unknown"
        wanted = _training_flops(sweep, folder, variant.match_flops_of, reference, other)
        spent = _training_flops(sweep, folder, name, config, changed)
    ratio = wanted / spent
    if math.isnan(ratio):
        raise SweepError(
            f"of variant {name} needs the FLOPs of a step, but {reason}. Set train.steps instead.",
            field="match_flops_of",
            value=variant.match_flops_of,
        )
    steps = max(1, round(config.train.steps * ratio))
    return changed | {
        "train.steps": steps,
        "optimizer.warmup_steps": min(steps, round(config.optimizer.warmup_steps * ratio)),
    }


def _training_flops(
    sweep: Sweep, folder: Folder, variant: str, config: Config, paths: Iterable[str]
) -> float:
    workdir = folder.run(f"{variant}/seed-{sweep.seeds[0]}/{PRETRAIN}")
    return flops.training_flops(effective_config(config, paths, workdir))


def _no_flops(config: Config) -> str:
    """Reason why the FLOPs of a step are not known, or ""."""
    if config.spec.tokens_per_step(config) is None:
        return f"config.recipe={config.recipe} is not pre-training on a corpus"
    if config.distillation.teacher:
        return (
            f"the FLOPs of config.distillation.teacher={config.distillation.teacher} do not count"
        )
    return ""


def _expand_variant(sweep: Sweep, folder: Folder, name: str, changed: dict, tasks) -> list[Run]:
    """Returns the run of one variant and seed, and its tasks."""
    config = _make_variant(sweep, name, changed)
    seed = changed["seed"]
    if sweep.tasks and not config.spec.followed_by:
        raise SweepError(
            f"of {sweep.config} allows no tasks.", field="config.recipe", value=config.recipe
        )
    if config.recipe == FINETUNE:
        if (seeds := changed.get("finetune.seeds", 1)) != 1:
            raise SweepError(
                f"of variant {name} must be 1. Use the seeds of the sweep (--seeds=N).",
                field="config.finetune.seeds",
                value=seeds,
            )
        changed = {"finetune.save_models": False, **changed, "finetune.seeds": 1}
        config = _make_variant(sweep, name, changed)
        return [Run(name, seed, FINETUNE, sweep.config, changed, config)]
    if not config.data.directory:
        changed["data.directory"] = str(folder.data(config))
        config = _make_variant(sweep, name, changed)
    pretrained = Run(name, seed, PRETRAIN, sweep.config, changed, config)
    ways = {"": False, SCRATCH: True} if sweep.from_scratch else {"": None}
    return [
        pretrained,
        *(
            _make_task(folder, pretrained, f"{task_name}{suffix}", task, tasks, from_scratch)
            for task_name, task in sweep.tasks.items()
            for suffix, from_scratch in ways.items()
        ),
    ]


def _make_task(folder: Folder, before: Run, name: str, task: Task, overrides, from_scratch) -> Run:
    changed = {**overrides, **task.changes, "init_from": str(folder.run(before.id))}
    config = make_config(f"task {name}", task.config, changed)
    following = before.config.spec.followed_by
    if config.recipe not in following:
        raise SweepError(
            f"of task {name} cannot follow {before.config.recipe}; expected "
            f"{' or '.join(following)}.",
            field="config.recipe",
            value=config.recipe,
        )
    section, seeds = "parallel", 1
    if config.recipe == FINETUNE:
        section, seeds = "finetune", config.finetune.seeds
        changed.setdefault("finetune.save_models", False)
    if from_scratch is not None:
        changed[f"{section}.from_scratch"] = from_scratch
    # no fine-tuning seed occurs twice, and all variants have the same
    changed["seed"] = before.seed * seeds
    config = make_config(f"task {name}", task.config, changed)
    return Run(before.variant, before.seed, name, task.config, changed, config, after=before.id)


def identity(config: Config) -> str:
    """Text that is equal for configs that train the same model: all fields that have an effect."""
    idle = {name: getattr(ModelSection(), name) for name in config.spec.idle_fields(config)}
    read = dataclasses.replace(config, model=dataclasses.replace(config.model, **idle))
    return repr(
        [
            (field.name, getattr(read, field.name))
            for field in dataclasses.fields(read)
            if field.name not in config.spec.unread
        ]
    )


def _check_distinct(runs: Sequence[Run]) -> None:
    seen: dict[str, Run] = {}
    for run in runs:
        if run.after or run.seed != runs[0].seed:
            continue
        other = seen.setdefault(identity(run.config), run)
        if other is not run:
            found = changes.differences(to_dict(other.config), to_dict(run.config))
            fields = ", ".join(f"config.{path}" for path in found)
            reason = f"{fields} has no effect here" if found else "their configs are equal"
            raise SweepError(
                f"Variants {other.variant} and {run.variant} train the same model: {reason}. "
                "Remove one of them, or the override that causes it."
            )


def _check_data_folder(runs: Sequence[Run], folder: Folder, overrides: Mapping[str, Any]) -> None:
    """One folder cannot hold shards of two lengths."""
    value = overrides.get("data.directory")
    first = runs[0]
    for run in runs if value else ():
        if not run.after and folder.data(run.config) != folder.data(first.config):
            raise SweepError(
                f"cannot hold the shards of both {first.variant} and {run.variant}.",
                field="--config.data.directory",
                value=value,
            )


def check_unchanged(runs: Iterable[Run], folder: Folder) -> tuple[int, list[str]]:
    """Compares the runs with the records in `folder`.

    Returns:
      Number of runs that have not started; ids of recorded runs that are not in the sweep.

    Raises:
      SweepError: a run that has started has another config now.
      DamagedFileError: a record is damaged.
    """
    records = {name: folder.read(name) for name in folder.recorded()}
    by_id = {run.id: run for run in runs}
    for name, record in records.items():
        run = by_id.get(name)
        if run is None or (record.state != FINISHED and not folder.run(name).is_bound()):
            continue
        try:
            before = to_dict(from_config_dict(record.config, check=False))
        except UserError as error:  # written by another version
            raise _named(str(folder.file(name, ".json")), error) from error
        found = changes.differences(before, to_dict(run.config))
        refused = {path: pair for path, pair in found.items() if _is_fixed(path, run)}
        if refused:
            raise SweepError(
                f"Cannot continue the sweep: {name} has started with another config: "
                f"{changes.describe(refused)}. Restore these fields, or use another --workdir.",
                path=folder.path,
            )
    return len(by_id.keys() - records.keys()), sorted(records.keys() - by_id.keys())


def _is_fixed(path: str, run: Run) -> bool:
    if path in _COMPARED or (path.startswith(_DECODING) and path != _DECODING_SPEED):
        return True
    if run.after and path == "init_from":  # the sweep's folder may have moved
        return False
    return not changes.is_changeable(Config, path, FINETUNE)  # its rules are stricter


def check_files(runs: Iterable[Run], folder: Folder) -> None:
    """Checks that weights, vocabularies, text and task files of unfinished runs exist, for one
    seed of each variant. Sources that are downloaded are not checked.

    Raises:
      SweepError: a file is missing or invalid; names the variant or the task.
    """
    seen = set()
    for run in runs:
        what = f"task {run.stage}" if run.after else f"variant {run.variant}"
        record = folder.read(run.id)
        if what in seen or (record and record.state == FINISHED):
            continue
        seen.add(what)
        try:
            if not run.after and _reads_weights(run.config):
                recipes.complete(run.config, folder.run(run.id).path, tuple(run.changes))
            data = folder.run(run.id).data(run.config)
            if data not in seen:
                seen.add(data)
                recipes.check_sources(run.config, data)
        except UserError as error:
            raise _named(what, error) from error


def effective_config(config: Config, paths: Iterable[str], workdir: Workdir) -> Config:
    """Config of a pre-training run with the sizes that its vocabulary and weights determine.

    Files that cannot be read leave it unchanged; `check_files` refuses them.

    Args:
      paths: fields that are set explicitly.
    """
    if not _reads_weights(config):
        return config
    try:
        return recipes.complete(config, workdir.path, tuple(paths))
    except UserError:
        return config


def _reads_weights(config: Config) -> bool:
    """Whether a vocabulary or weights determine sizes of the model."""
    vocabularies = (config.tokenizer.path, config.parallel.target_vocabulary)
    return any((*vocabularies, config.init_from, config.distillation.teacher))


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
    if run.stage != PRETRAIN or run.config.spec.tokens_per_step(run.config) is None:
        return None
    phases = zip(run.config.phase_configs, run.config.phase_lengths, strict=True)
    return sum(steps * phase.spec.tokens_per_step(phase) for phase, steps in phases)


def count_flops(run: Run, folder: Folder) -> float | None:
    """Training FLOPs by the convention "model" of `analysis.flops`; None as `count_tokens`."""
    if count_tokens(run) is None:
        return None
    return flops.training_flops(_effective(run, folder))


def _effective(run: Run, folder: Folder) -> Config:
    return effective_config(run.config, run.changes, folder.run(run.id))


def describe_changes(variant: Variant, run: Run) -> str:
    """Changes of a variant as PATH=VALUE, with the steps that it gets in one of its runs."""
    changes = dict(variant.changes)
    if variant.match_flops_of:
        changes["train.steps"] = run.changes["train.steps"]
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
