"""What a run of a model that writes text starts with: its vocabularies, and the weights of another
run, as a translator that starts from span corruption.
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
    """Parameters of a run of the same kind of model."""

    params: Params
    step: int


def read_start(
    config: Config, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, RunWeights | None]:
    """As `start.read_start`: the sizes and the vocabularies follow the files and the run that
    config.init_from names.

    Raises:
      UserError: no such file or run, one of another kind of model, or fields that were asked for
        and contradict it.
    """
    config = _follow_files(config, given)
    if not config.init_from:
        return config, None
    begun = workdir.is_bound()
    if begun and workdir.config.exists():
        kept = use_copies(workdir, workdir.read_config())
        if (kept.recipe, kept.init_from) != (config.recipe, config.init_from):
            return config, None  # refused later, by name
        return _follow(config, _fields_of(kept), given), None
    source = Workdir(config.init_from)
    kept = _read_config(config, source)
    fields = _fields_of(kept) | _vocabulary_of(kept, source)
    fields = matching.keep_given(fields, config, given, config.init_from)
    config = _follow(config, fields, given)
    if begun:
        return config, None
    if config.parallel.from_scratch and config.reads_pairs:
        logging.info("Random weights, of the sizes of %s.", config.init_from)
        return config, None
    step, params = sources.read_params(source, kept, None)
    logging.info("Starting from step %d of %s.", step, config.init_from)
    return config, RunWeights(params, step)


def _follow_files(config: Config, given: Collection[str]) -> Config:
    """With the sizes of the vocabularies that are named."""
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    path = config.parallel.target_vocabulary
    if not path:
        return config
    size = follow_file(dataclasses.replace(config.tokenizer, path=path)).vocab_size
    return matching.replace(config, {"parallel.target_vocab_size": size})


def _read_config(config: Config, source: Workdir) -> Config:
    """Of the run to start from.

    Raises:
      ConfigError: it is none, or its model is of another kind.
    """
    if not source.holds_run():
        raise ConfigError(
            f"config.init_from={config.init_from} is no run; a model that writes text starts from "
            "the folder of a run of one.",
            field="config.init_from",
            value=config.init_from,
        )
    kept = source.read_config()
    if not kept.writes_text:
        raise ConfigError(
            f"config.init_from={config.init_from} is a run of config.recipe='{kept.recipe}', an "
            "encoder; a model that writes text starts from one that does.",
            field="config.init_from",
            value=config.init_from,
        )
    if (kept.recipe == "causal_lm") != (config.recipe == "causal_lm"):
        one, other = "a language model", "an encoder-decoder"
        if config.recipe == "causal_lm":
            one, other = other, one
        raise ConfigError(
            f"config.init_from={config.init_from} is {one} (config.recipe='{kept.recipe}'), and "
            f"config.recipe='{config.recipe}' is of {other}.",
            field="config.init_from",
            value=config.init_from,
        )
    return kept


def _fields_of(kept: Config) -> dict[str, Any]:
    """What decides the parameters, and the vocabularies as that run names them."""
    fields = {p: v for p, v in matching.sizes_of(kept).items() if p.startswith("model.")}
    sequence, tokenizer = dataclasses.asdict(kept.sequence), dataclasses.asdict(kept.tokenizer)
    fields |= {f"sequence.{name}": value for name, value in sequence.items()}
    fields |= {f"tokenizer.{name}": value for name, value in tokenizer.items()}
    for name in ("target_vocab_size", "target_vocabulary"):
        fields[f"parallel.{name}"] = getattr(kept.parallel, name)
    return matching.decisive(fields)


def _vocabulary_of(kept: Config, source: Workdir) -> dict[str, Any]:
    """Where the vocabularies are that lie with the run.

    Raises:
      TokenizerError: as `read_tokenizers`.
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
