"""Recipes on pairs of texts: translation, summarization, text to text."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from etils import epath

from convbert_jax.analysis import flops
from convbert_jax.config import Config
from convbert_jax.data.parallel_text import References
from convbert_jax.objectives import written_text
from convbert_jax.recipes import prepared, scoring
from convbert_jax.recipes.prepared import Data, Effort
from convbert_jax.recipes.recipe import GenerativeRecipe, Recipe
from convbert_jax.training import partitioning
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir


class PairRecipe(Recipe):
    """A recipe that reads pairs of texts."""

    def list_fields(self, config: Config) -> tuple[str, ...]:
        """Returns the fields of a batch of [rows, length]."""
        raise NotImplementedError

    def check_batches(
        self, config: Config, mesh: jax.sharding.Mesh, *, training: bool = True
    ) -> None:
        # Batches are built to be divisible.
        multiple = config.parallel.length_multiple
        partitioning.check_length(multiple, mesh, field="config.parallel.length_multiple")

    def batch_shapes(self, config: Config, shards: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        length = config.parallel.max_length
        unit = shards * config.train.accumulation
        count = max(1, config.parallel.batch_tokens // length // unit) * unit
        rows = jax.ShapeDtypeStruct((count, length), jnp.int32)
        return dict.fromkeys(self.list_fields(config), rows)

    def effort(self, config: Config, shards: int = 1) -> Effort:
        rows, length = self.batch_shapes(config, shards)["tokens"].shape
        texts = config.spec.pair_format(config).texts
        work = 3 * rows * flops.pair_forward_flops(config, length, length)
        return Effort(texts * rows * length, work)

    def open_data(self, config: Config, workdir: Workdir) -> Data:
        return prepared.pair_data(config, prepared.open_prepared(config, workdir))


class TextPairs(PairRecipe, GenerativeRecipe):
    objective = written_text

    def list_fields(self, config: Config) -> tuple[str, ...]:
        return ("tokens", "segment_ids", "labels", "source", "source_ids")

    def check(self, config: Config) -> None:
        if scoring.can_score():
            scoring.check(config, tests=False)

    def check_scores(self, config: Config) -> dict[str, References]:
        return scoring.check(config, tests=True) if scoring.can_score() else {}

    def write_and_score(
        self,
        config: Config,
        data: Data,
        folder: epath.Path,
        read: Callable[[], tuple[Sequence[int], Params]],
        tests: Mapping[str, References],
    ) -> tuple[list[scoring.Set], str]:
        if not scoring.can_score():
            return [], scoring.NOT_SCORED
        steps, params = read()
        return scoring.score_sets(
            config, params, data.tokenizers, data.pairs, folder, steps=steps, tests=tests
        )
