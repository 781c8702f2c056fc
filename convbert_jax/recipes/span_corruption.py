"""Span corruption (T5 §3.1.4): an encoder-decoder predicts spans that were taken out of a text."""

from typing import Any

import jax

from convbert_jax.config import Config, ConfigError
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces import SpecialIds
from convbert_jax.objectives import span_corruption
from convbert_jax.recipes.recipe import GenerativeRecipe
from convbert_jax.recipes.reports import page
from convbert_jax.training import partitioning
from convbert_jax.workdir import Workdir


class SpanCorruption(GenerativeRecipe):
    objective = span_corruption
    purpose = "Fill in every [MASK] in the lines of a file"

    def settings(
        self, config: Config, special: SpecialIds, tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        check_sentinels(config, len(special.sentinels))
        return {}

    def check(self, config: Config) -> None:
        if not config.tokenizer.path:
            check_sentinels(config, config.tokenizer.sentinels)

    def check_batches(
        self, config: Config, mesh: jax.sharding.Mesh, *, training: bool = True
    ) -> None:
        super().check_batches(config, mesh, training=training)
        of_row = f"of rows of config.data.length={config.data.length}: length"
        counts = span_corruption.count_spans(config)
        partitioning.check_length(counts.source, mesh, field=f"sources {of_row}")
        partitioning.check_length(counts.target, mesh, field=f"targets {of_row}")

    def count_sentinels(self, config: Config) -> int:
        return span_corruption.count_spans(config).spans

    def commands(self, config: Config, workdir: Workdir, step: int) -> list[page.Command]:
        use, *others = super().commands(config, workdir, step)
        return [use, page.finetune_on_pairs(workdir), *others]


def check_sentinels(config: Config, there: int) -> None:
    """Checks that the vocabulary has a sentinel for each span of a row.

    Args:
      there: number of sentinels of the vocabulary.

    Raises:
      ConfigError: there are fewer; the message has the required number.
    """
    needed = span_corruption.count_spans(config).spans
    if there < needed:
        raise ConfigError(
            f"config.recipe='span_corruption' needs {needed} sentinels for rows of "
            f"{config.data.length} tokens, but the vocabulary has {there}. Train a vocabulary with "
            f"config.tokenizer.sentinels={needed}, or use one that has them.",
            field="config.tokenizer.sentinels",
        )
