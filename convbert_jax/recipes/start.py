"""Initial config, vocabularies and weights of a run.

A generative model may start from another run, as translation initialized from span corruption.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config, ConfigError, from_config_dict, lengths, to_dict
from convbert_jax.data.stores import store_of
from convbert_jax.data.tokenizer.normalization import unresolved
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.sources import read_tokenizers, use_copies
from convbert_jax.recipes import prepared, teaching
from convbert_jax.training import checkpoints, optimizer
from convbert_jax.training.environment import describe_devices
from convbert_jax.training.partitioning import Params, count_params
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class RunWeights:
    """Parameters of a run with the same kind of model."""

    params: Params
    step: int


def _read_generative_start(
    config: Config, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, RunWeights | None]:
    """Implements `read_start` for generative models.

    Sizes and vocabularies are taken from the vocabulary files and the run config.init_from.

    Raises:
      UserError: a file or run does not exist, the run has another kind of model, or a field of
        `given` conflicts with it.
    """
    config = _follow_files(config, given)
    if not config.init_from:
        return config, None
    begun = workdir.is_bound()
    if begun and workdir.config.exists():
        kept = use_copies(workdir, workdir.read_config())
        if (kept.recipe, kept.init_from) != (config.recipe, config.init_from):
            return config, None  # raises later, with the name of the field
        return _with_fields(config, _fields_of(kept), given), None
    source = Workdir(config.init_from)
    kept = _read_config(config, source)
    fields = _fields_of(kept) | _vocabulary_of(kept, source)
    fields = matching.keep_given(fields, config, given, config.init_from)
    config = _with_fields(config, fields, given)
    if begun:
        return config, None
    if config.parallel.from_scratch and "parallel" not in config.spec.unread:
        logging.info("Initialized random weights with the sizes of %s.", config.init_from)
        return config, None
    step, params = sources.read_params(source, kept, None)
    logging.info("Initialized from step %d of %s.", step, config.init_from)
    return config, RunWeights(params, step)


def _follow_files(config: Config, given: Collection[str]) -> Config:
    """Sets the vocabulary sizes from the vocabulary files of the config."""
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    path = config.parallel.target_vocabulary
    if not path:
        return config
    size = follow_file(dataclasses.replace(config.tokenizer, path=path)).vocab_size
    return matching.replace(config, {"parallel.target_vocab_size": size})


def _read_config(config: Config, source: Workdir) -> Config:
    """Reads the config of the run config.init_from.

    Raises:
      ConfigError: it is not a run, or has another kind of model.
    """
    if not source.holds_run():
        raise ConfigError(
            f"config.init_from={config.init_from} is not a run. Use the folder of a run of a "
            "generative model.",
            field="config.init_from",
            value=config.init_from,
        )
    kept = source.read_config()
    if kept.spec.network != config.spec.network:
        raise ConfigError(
            f"config.init_from={config.init_from} is {kept.spec.network} "
            f"(config.recipe='{kept.recipe}'), but config.recipe='{config.recipe}' needs "
            f"{config.spec.network}.",
            field="config.init_from",
            value=config.init_from,
        )
    return kept


def _fields_of(kept: Config) -> dict[str, Any]:
    """Returns the fields of `kept` that determine parameter shapes and vocabularies."""
    fields = {p: v for p, v in matching.sizes_of(kept).items() if p.startswith("model.")}
    sequence, tokenizer = dataclasses.asdict(kept.sequence), dataclasses.asdict(kept.tokenizer)
    fields |= {f"sequence.{name}": value for name, value in sequence.items()}
    fields |= {f"tokenizer.{name}": value for name, value in tokenizer.items()}
    for name in ("target_vocab_size", "target_vocabulary"):
        fields[f"parallel.{name}"] = getattr(kept.parallel, name)
    return matching.decisive(fields)


def _vocabulary_of(kept: Config, source: Workdir) -> dict[str, Any]:
    """Returns fields with the paths of the vocabularies stored in the run.

    Raises:
      TokenizerError: see `read_tokenizers`.
    """
    made = read_tokenizers(source, kept)
    fields = {"tokenizer.path": str(made[0].path.absolute())}
    if made[0] is not made[1]:
        fields["parallel.target_vocabulary"] = str(made[1].path.absolute())
        fields["parallel.target_vocab_size"] = made[1].vocab_size
    return fields


def _with_fields(config: Config, fields: dict[str, Any], given: Collection[str]) -> Config:
    """Replaces the fields that the user did not set."""
    fields = {path: value for path, value in fields.items() if path not in given}
    return from_config_dict(to_dict(matching.replace(config, fields)))


def read_start(
    config: Config, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, sources.Source | RunWeights | None]:
    """Completes the config from its vocabulary file and weights, and reads `config.init_from`.

    Args:
      given: paths of fields that the user set, as "model.layers". A conflict with the vocabulary
        or the weights is an error; other fields are taken from these.

    Returns:
      (config, weights); weights are None without config.init_from or if the run has begun.

    Raises:
      UserError: vocabulary or weights do not exist or do not match the config.
    """
    config, source = _read_start(config, workdir, given)
    return count_steps(config, workdir), source


def count_steps(config: Config, workdir: Workdir, *, required: bool = False) -> Config:
    """Replaces lengths as "100M words" by numbers of steps of the prepared corpus.

    Args:
      required: raise ConfigError if the corpus is not prepared; else `config` is returned.
    """
    units = {lengths.parse(text, field)[1] for field, text in lengths.find_texts(config)}
    if not units and not config.phases:
        return config
    counted = units & {"words", "epochs", lengths.HOURS}
    folder = sources.trained_folder(workdir, config) if counted else None

    def rates(of_phase: Config):
        rows = prepared.folder_of_rows(config, of_phase)
        of_corpus = store_of(config).rates(of_phase, folder / rows) if counted else {}
        return lengths.tokens_of_step(of_phase) | of_corpus

    if not required and any(counted - rates(of_phase).keys() for of_phase in config.phase_configs):
        return config
    found = lengths.to_steps(config, rates)
    if units:
        logging.info(
            "The run has %s steps%s; lengths as numbers of steps are in %s.",
            f"{found.train.steps:,}",
            "".join(f", {phase.name} {phase.length:,}" for phase in found.phases),
            workdir.config,
        )
    return from_config_dict(to_dict(found))


def _read_start(
    config: Config, workdir: Workdir, given: Collection[str]
) -> tuple[Config, sources.Source | RunWeights | None]:
    """Implements `read_start`, except for lengths."""
    workdir.data(config)
    if workdir.is_bound() and workdir.config.exists():
        config = _keep_chosen(use_copies(workdir, config), workdir.read_config())
    if config.spec.generates:
        return _read_generative_start(config, workdir, given)
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    config = teaching.follow(config, workdir, given)
    if not config.init_from:
        return config, None
    begun = workdir.is_bound()
    if begun and workdir.config.exists():
        return _as_begun(config, workdir, given), None
    source = sources.read_source(config.init_from)
    config = importing.follow_source(config, source, given)
    return config, None if begun else source


def _keep_chosen(config: Config, kept: Config) -> Config:
    """Replaces "auto" in config.tokenizer, and a number of hours, by the values of the run."""
    section = config.tokenizer
    chosen = {name: getattr(kept.tokenizer, name) for name in unresolved(section)}
    config = dataclasses.replace(config, tokenizer=dataclasses.replace(section, **chosen))
    if lengths.hours_of(config) is None:
        return config
    steps = kept.train.steps
    logging.info("config.train.steps=%s: the run has %s steps.", config.train.steps, f"{steps:,}")
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def _as_begun(config: Config, workdir: Workdir, given: Collection[str]) -> Config:
    """Takes vocabulary and sizes from the run in `workdir`; config.init_from may be gone."""
    kept = use_copies(workdir, workdir.read_config())
    if (kept.recipe, kept.init_from) != (config.recipe, config.init_from):
        return config  # raises later, with the name of the field
    fields = matching.sizes_of(kept)
    if not config.tokenizer.path:
        section = dataclasses.asdict(kept.tokenizer)
        fields |= {f"tokenizer.{name}": value for name, value in section.items()}
    return _with_fields(config, fields, given)


def opt_state_of(config: Config) -> Callable[[Any], Any] | None:
    """Returns a function that reads the optimizer state of config.init_from=RUN@PHASE.

    Only its schedule starts again at step 0.

    Returns:
      abstract state -> state; None if config.init_from is something else.
    """
    path, phase, _ = sources.split_run(config.init_from)
    if not phase:
        return None
    workdir = Workdir(path)
    step = sources.step_of_phase(workdir, phase)

    def read(abstract):
        place = workdir.checkpoints / str(step)
        try:
            found = checkpoints.read_parts(storage.absolute(place), {"opt_state": abstract})
        except checkpoints.CheckpointError as error:
            raise ConfigError(
                f"has no optimizer state for this run: {error}. Use the same recipe and "
                f"config.optimizer.method, or config.init_from={path} for a new state.",
                field="config.init_from",
                value=config.init_from,
            ) from error
        logging.info("Read the optimizer state of step %d of %s.", step, path)
        return optimizer.restart_schedule(found["opt_state"])

    return read


def log_run(config: Config, workdir: Workdir, found: Sequence[jax.Device], params: Params) -> None:
    """Logs the name, recipe, size, folder and devices of a run."""
    logging.info(
        "Running %s (%s, %s parameters) in %s on %s. All fields: %s.",
        config.name,
        config.recipe,
        f"{count_params(params):,}",
        workdir,
        describe_devices(found),
        workdir.config,
    )


def fill(config: Config, source: sources.Source | RunWeights) -> Params:
    """Returns initial parameters: from the source, randomly initialized where it has none."""
    if isinstance(source, RunWeights):
        return source.params
    params, report = sources.initialize(config, source)
    for line in report.lines():
        logging.info("%s", line)
    return params
