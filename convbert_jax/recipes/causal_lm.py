"""Language modeling: prediction of the next token."""

from typing import Any

import jax.numpy as jnp

from convbert_jax.config import Config
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.interfaces import Rules, SpecialIds
from convbert_jax.models.networks import sharding_rules
from convbert_jax.objectives import next_tokens
from convbert_jax.recipes.recipe import GenerativeRecipe


class CausalLM(GenerativeRecipe):
    objective = next_tokens
    purpose = "Continue each line of a file"

    def rules(self, config: Config) -> Rules:
        return sharding_rules(config.language_model)

    def settings(
        self, config: Config, special: SpecialIds, tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        return {"begins_word": jnp.asarray(tokenizer.begins_word)}
