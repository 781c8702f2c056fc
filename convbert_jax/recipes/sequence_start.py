"""Initial config, vocabularies and weights of a generative model.

Weights may come from another run, as translation initialized from span corruption.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

from absl import logging

from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interop import matching, sources
from convbert_jax.interop.runs.vocabulary import read_tokenizers, use_copies
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class RunWeights:
    """Parameters of a run with the same kind of model."""

    params: Params
    step: int


def read_start(
    config: Config, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, RunWeights | None]:
    """Implements `start.read_start` for generative models.

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
        return _follow(config, _fields_of(kept), given), None
    source = Workdir(config.init_from)
    kept = _read_config(config, source)
    fields = _fields_of(kept) | _vocabulary_of(kept, source)
    fields = matching.keep_given(fields, config, given, config.init_from)
    config = _follow(config, fields, given)
    if begun:
        return config, None
    if config.parallel.from_scratch and config.reads_pairs:
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
    if not kept.writes_text:
        raise ConfigError(
            f"config.init_from={config.init_from} is an encoder (config.recipe='{kept.recipe}'). "
            "Use a run of a generative model.",
            field="config.init_from",
            value=config.init_from,
        )
    if (kept.recipe == "causal_lm") != (config.recipe == "causal_lm"):
        one, other = "a language model", "an encoder-decoder"
        if config.recipe == "causal_lm":
            one, other = other, one
        raise ConfigError(
            f"config.init_from={config.init_from} is {one} (config.recipe='{kept.recipe}'), but "
            f"config.recipe='{config.recipe}' needs {other}.",
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


def _follow(config: Config, fields: dict[str, Any], given: Collection[str]) -> Config:
    fields = {path: value for path, value in fields.items() if path not in given}
    return from_config_dict(to_dict(matching.replace(config, fields)))
