"""Contrastive fine-tuning of an encoder on pairs of texts; see `objectives.contrastive`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from convbert_jax.config import Config
from convbert_jax.interfaces import TEXTS_OF_PAIR
from convbert_jax.objectives import contrastive
from convbert_jax.recipes.recipe import EncoderRecipe
from convbert_jax.recipes.reports import page
from convbert_jax.recipes.text_pairs import PairRecipe
from convbert_jax.workdir import Workdir


class Embedding(PairRecipe, EncoderRecipe):
    objective = contrastive
    show = ("contrastive_loss", "contrastive_accuracy")

    def list_fields(self, config: Config) -> tuple[str, ...]:
        texts = config.spec.pair_format(config).texts
        return tuple(field for text in TEXTS_OF_PAIR[:texts] for field in text)

    def batch_shapes(self, config: Config, shards: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        batch = super().batch_shapes(config, shards)
        if config.spec.pair_format(config).scored:
            batch["score"] = jax.ShapeDtypeStruct(batch["tokens"].shape[:1], jnp.float32)
        return batch

    def warn(self, config: Config, step: int, values: Mapping[str, float]) -> list[str]:
        return []

    def commands(self, config: Config, workdir: Workdir, step: int) -> list[page.Command]:
        return page.after_vectors(config, workdir, step)
