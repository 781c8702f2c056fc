"""Masked language modeling (BERT §3.1), optionally with sentence pairs."""

from collections.abc import Mapping

from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.pretraining_report import Cloze
from convbert_jax.config import Config
from convbert_jax.objectives import masked_lm
from convbert_jax.recipes.prepared import Data
from convbert_jax.recipes.recipe import EncoderRecipe
from convbert_jax.recipes.reports import pretraining as reports
from convbert_jax.training.partitioning import Params


class MaskedLM(EncoderRecipe):
    objective = masked_lm
    show = ("mlm_loss", "mlm_accuracy", "pair_accuracy")

    def warn(self, config: Config, step: int, values: Mapping[str, float]) -> list[str]:
        return pretraining_report.warn_masked_lm(step, values)

    def fill_in(self, config: Config, data: Data, params: Params) -> Cloze:
        return reports.fill_in(config, data.corpus, params)
