"""`Recipe`: what the training of one model needs besides its config, in one object.

Each recipe is a file of this folder with a subclass, and a row of `RECIPES` in `tasks.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath

from convbert_jax.analysis import flops, pretraining_report
from convbert_jax.analysis.pretraining_report import Cloze, Suspects
from convbert_jax.config import Config
from convbert_jax.data.parallel_text import References
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.generation import read_mean
from convbert_jax.interfaces import Evaluator, Rules, SpecialIds
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import outline
from convbert_jax.models.networks import sharding_rules
from convbert_jax.objectives import metrics, written_text
from convbert_jax.recipes import prepared
from convbert_jax.recipes.prepared import Data, Effort
from convbert_jax.recipes.reports import page
from convbert_jax.recipes.scoring import Set
from convbert_jax.training import checkpoints, partitioning
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir


class Recipe:
    """A recipe that trains one model on rows of a corpus.

    Attributes:
      objective: has loss(model, batch, key, *, train, dtype, config, special) -> (loss, metrics).
      show: metrics of the log line, if the config computes them.
    """

    objective: ModuleType
    show: tuple[str, ...]

    def warn(self, config: Config, step: int, values: Mapping[str, float]) -> list[str]:
        """Returns warnings about the metrics of a log line."""
        raise NotImplementedError

    def evaluator(self, config: Config) -> Evaluator:
        """Returns the evaluator of the held-out metrics."""
        raise NotImplementedError

    def rules(self, config: Config) -> Rules:
        """Returns the partition rules of the model."""
        raise NotImplementedError

    def settings(
        self, config: Config, special: SpecialIds, tokenizer: Tokenizer | None
    ) -> dict[str, Any]:
        """Returns further arguments of the loss.

        Raises:
          ConfigError: the vocabulary does not fit the objective.
        """
        return {}

    def check(self, config: Config) -> None:
        """Checks before data is read that the run can be finished; raises UserError."""

    def check_batches(
        self, config: Config, mesh: jax.sharding.Mesh, *, training: bool = True
    ) -> None:
        """Checks that the mesh divides batch size and row length.

        Args:
          training: the batch must also be divisible into microbatches.

        Raises:
          ShardingError: a size is not divisible.
        """
        partitioning.check_length(config.data.length, mesh)
        partitioning.check_batch_size(
            config.train.batch_size,
            config.train.accumulation if training else 1,
            mesh,
            replicas=config.optimizer.release_replicas if training else 1,
        )

    def batch_shapes(self, config: Config, shards: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the batch of one step, int32 [rows, length]; the longest of pairs.

        Args:
          shards: the number of rows of pairs is a multiple of this times
            config.train.accumulation.
        """
        rows = jax.ShapeDtypeStruct((config.train.batch_size, config.data.length), jnp.int32)
        batch = dict.fromkeys(("tokens", "segment_ids", "type_ids"), rows)
        if config.data.layout == "pairs":
            batch["pair_label"] = jax.ShapeDtypeStruct(rows.shape[:1], jnp.int32)
        return batch

    def count_sentinels(self, config: Config) -> int:
        """Returns the number of sentinels that the vocabulary must have."""
        return 0

    def effort(self, config: Config, shards: int = 1) -> Effort:
        """Returns the cost of a step on batches of `batch_shapes`."""
        tokens = config.train.batch_size * config.data.length
        return Effort(tokens, tokens * flops.training_flops_per_token(config))

    def open_data(self, config: Config, workdir: Workdir) -> Data:
        """Opens training and held-out data; raises as `prepared.open_prepared`."""
        make = prepared.mixed_data if config.data.mixture else prepared.corpus_data
        return make(config, prepared.open_prepared(config, workdir), self.effort)

    def log_start(self, config: Config) -> None:
        """Logs notes about the model at the start of a run."""

    def read_params(
        self, workdir: Workdir, config: Config, abstract: Params, step: int | None
    ) -> tuple[tuple[int, ...], Params]:
        """Returns the steps of the checkpoints to evaluate, and their mean parameters."""
        step, params = checkpoints.load_params(workdir.checkpoints, abstract, step)
        return (step,), params

    def fill_in(self, config: Config, data: Data, params: Params) -> Cloze | None:
        """Returns predictions for masked tokens, for the report."""
        return None

    def detect(self, config: Config, data: Data, params: Params) -> Suspects | None:
        """Returns predicted replacements, for the report."""
        return None

    def check_scores(self, config: Config) -> dict[str, References]:
        """Checks before an evaluation that texts can be scored; returns the test sets by name."""
        return {}

    def write_and_score(
        self,
        config: Config,
        data: Data,
        folder: epath.Path,
        read: Callable[[], tuple[Sequence[int], Params]],
        tests: Mapping[str, References],
    ) -> tuple[list[Set], str]:
        """Generates texts for held-out pairs and test sets, and scores them.

        Args:
          folder: output folder of the texts.
          read: returns the steps of the checkpoints and their mean parameters, on the host.

        Returns:
          (scored sets, reason if the held-out pairs were not scored).
        """
        return [], ""

    def commands(self, config: Config, workdir: Workdir, step: int) -> list[page.Command]:
        """Returns what to do after the run, as (purpose, command)."""
        raise NotImplementedError


class EncoderRecipe(Recipe):
    """A recipe that pre-trains an encoder."""

    def evaluator(self, config: Config) -> Evaluator:
        return metrics.heldout(config.heldout_metrics, self.objective.terms(config))

    def rules(self, config: Config) -> Rules:
        return sharding_rules(config.encoder)

    def log_start(self, config: Config) -> None:
        networks = outline(config)
        if networks["main"].masked:
            logging.info(
                "The convolutions ignore padding. transformers and sentence-transformers need "
                "trust_remote_code=True for equal outputs on padded batches. For equal outputs "
                "without it train with --config.model.mask_convolution=false "
                "--config.data.layout=electra. See docs/howto/export_weights.md#padded-batches."
            )
        if config.checkpoint.huggingface_every:
            conversion.check_expressible(conversion.expressible(networks, "huggingface"))

    def commands(self, config: Config, workdir: Workdir, step: int) -> list[page.Command]:
        return page.after_encoder(config, workdir, step)


class GenerativeRecipe(Recipe):
    """A recipe that trains a language model or an encoder-decoder."""

    show = ("token_loss", "token_accuracy", "perplexity", "word_perplexity")
    purpose = "Generate a text for each line of a file"

    def warn(self, config: Config, step: int, values: Mapping[str, float]) -> list[str]:
        return pretraining_report.warn_writing(step, values)

    def evaluator(self, config: Config) -> Evaluator:
        return written_text.heldout(config.heldout_metrics)

    def rules(self, config: Config) -> Rules:
        return sharding_rules(config.encoder_decoder)

    def read_params(self, workdir, config, abstract, step):
        if config.decoding.average > 1:
            return read_mean(workdir, config, step)
        return super().read_params(workdir, config, abstract, step)

    def commands(self, config: Config, workdir: Workdir, step: int) -> list[page.Command]:
        return page.after_generative(config, workdir, step, self.purpose)
