"""Replaced-token detection (ELECTRA §2)."""

from collections.abc import Mapping

from absl import logging

from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.pretraining_report import Cloze, Suspects
from convbert_jax.config import Config
from convbert_jax.objectives import replaced_token
from convbert_jax.recipes.prepared import Data
from convbert_jax.recipes.recipe import EncoderRecipe
from convbert_jax.recipes.reports import pretraining as reports
from convbert_jax.training.partitioning import Params


class ReplacedToken(EncoderRecipe):
    objective = replaced_token
    show = ("mlm_loss", "mlm_accuracy", "encoder_mlm_loss", "replaced_rate", "discriminator_auc")

    def warn(self, config: Config, step: int, values: Mapping[str, float]) -> list[str]:
        uniform = config.generator.kind == "uniform"
        return pretraining_report.warn_replaced_token(step, values, uniform)

    def log_start(self, config: Config) -> None:
        super().log_start(config)
        if first := config.objective.masked_lm_steps:
            logging.info(
                "Steps 1 to %d train the encoder on masked words, later steps (from %d) on "
                "replaced tokens.",
                first,
                first + 1,
            )

    def fill_in(self, config: Config, data: Data, params: Params) -> Cloze | None:
        if config.generator.kind == "uniform":
            return None
        return reports.fill_in(config, data.corpus, params)

    def detect(self, config: Config, data: Data, params: Params) -> Suspects:
        return reports.detect(config, data.corpus, params)
