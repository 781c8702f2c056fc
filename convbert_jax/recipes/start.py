"""Initial config and weights of a run."""

import dataclasses
from collections.abc import Collection, Sequence

import jax
from absl import logging

from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.tokenizer.normalization import unresolved
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.networks import abstract_params
from convbert_jax.interop.runs.vocabulary import use_copies
from convbert_jax.recipes import sequence_start, teaching
from convbert_jax.recipes.sequence_start import RunWeights
from convbert_jax.training.environment.devices import describe_devices
from convbert_jax.training.state import count
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir


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
    workdir.data(config)
    if workdir.is_bound() and workdir.config.exists():
        config = _keep_chosen(use_copies(workdir, config), workdir.read_config())
    if config.writes_text:
        return sequence_start.read_start(config, workdir, given)
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
    """Replaces "auto" in config.tokenizer by the values that the run has chosen."""
    section = config.tokenizer
    chosen = {name: getattr(kept.tokenizer, name) for name in unresolved(section)}
    return dataclasses.replace(config, tokenizer=dataclasses.replace(section, **chosen))


def _as_begun(config: Config, workdir: Workdir, given: Collection[str]) -> Config:
    """Takes vocabulary and sizes from the run in `workdir`; config.init_from may be gone."""
    kept = use_copies(workdir, workdir.read_config())
    if (kept.recipe, kept.init_from) != (config.recipe, config.init_from):
        return config  # raises later, with the name of the field
    fields = matching.sizes_of(kept)
    if not config.tokenizer.path:
        section = dataclasses.asdict(kept.tokenizer)
        fields |= {f"tokenizer.{name}": value for name, value in section.items()}
    fields = {path: value for path, value in fields.items() if path not in given}
    return from_config_dict(to_dict(matching.replace(config, fields)))


def log_run(config: Config, workdir: Workdir, found: Sequence[jax.Device]) -> None:
    """Logs the name, recipe, size, folder and devices of a run."""
    params = abstract_params(config)
    if config.recipe == "finetune":
        params = {name: part for name, part in params.items() if name != "head"}  # differs per task
    logging.info(
        "Running %s (%s, %s parameters) in %s on %s. All fields: %s.",
        config.name,
        config.recipe,
        f"{count(params):,}",
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
