"""A generative model applied to texts; created by `convbert_jax.load`."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from convbert_jax.config import Config
from convbert_jax.data.inputs.arguments import ArgumentError, as_single_texts
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.model import ModelError
from convbert_jax.inference.writing.reading import change_decoding, read_mean
from convbert_jax.inference.writing.writer import Writer
from convbert_jax.interop.runs.vocabulary import read_tokenizers
from convbert_jax.workdir import Workdir


class TextModel:
    """A generative model with its tokenizers.

    Attributes:
      path: folder of the run.
      config: config of the run.
      step: number of training steps.
      tokenizers: source and target tokenizer.
    """

    def __init__(self, path: str, config: Config, step: int | None, *, dtype: jnp.dtype):
        """
        Args:
          step: step of the checkpoint, None for the newest.
          dtype: dtype of the computation; scores are float32.

        Raises:
          UserError: the run cannot be read.
        """
        workdir = Workdir(path)
        self.path, self.config = path, config
        self.tokenizers: tuple[Tokenizer, Tokenizer] = read_tokenizers(workdir, config)
        (*_, self.step), params = read_mean(workdir, config, step)
        self._writer = Writer(config, params, self.tokenizers, dtype)

    def __repr__(self) -> str:
        return f"<TextModel {self.path}: {self.config.recipe}, step {self.step}>"

    @property
    def abilities(self) -> tuple[str, ...]:
        """Supported methods: `write`; `translate` and `summarize` are the same, by recipe."""
        return ("write",)

    def translate(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Translates texts.

        Args:
          texts: texts in the source language; a single string is one text.
          decoding: fields of config.decoding to change, as `beam=8`, `method="greedy"` or
            `n_best=4`.

        Returns:
          A list with the translation of each text. With n_best > 1 each item is a list of at most
          n_best (text, score) in decreasing order; score = log probability /
          tokens^length_penalty. For a single string its item.

        Raises:
          ModelError: the run is not a translation model.
          ArgumentError: `texts` is not texts, or a text is empty or too long.
          ConfigError: the decoding fields are invalid.

        >>> translator = convbert_jax.load("runs/pairs")
        >>> len(translator.translate(["a text", "another"]))
        2
        >>> best, *_ = translator.translate("a text", beam=3, n_best=2)
        >>> best.score <= 0
        True
        """
        return self._write("translation", "translate", texts, decoding)

    def summarize(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Summarizes texts; arguments, results and errors: see `translate`."""
        return self._write("summarization", "summarize", texts, decoding)

    def write(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Generates texts with a model of any recipe.

        text_to_text returns outputs, causal_lm the prompts with their continuation, and
        span_corruption the texts with every [MASK] filled. Arguments, results and errors: see
        `translate`; a prompt may be empty.
        """
        return self._write(self.config.recipe, "write", texts, decoding)

    def encode(self, *_: Any, **__: Any) -> None:
        """Raises ModelError: only encoders have embeddings."""
        raise ModelError(
            f"{self.path} is a generative model (config.recipe='{self.config.recipe}') without "
            "embeddings of texts. Load a run of an encoder.",
            path=self.path,
        )

    def _write(self, recipe: str, name: str, texts, fields: dict[str, Any]) -> Any:
        own = {"translation": "translate", "summarization": "summarize"}
        if self.config.recipe != recipe:
            fitting = own.get(self.config.recipe, "write")
            raise ModelError(
                f"{self.path} is a run of config.recipe='{self.config.recipe}'. Call "
                f"{fitting}() instead of {name}().",
                path=self.path,
            )
        if "average" in fields:
            raise ModelError(
                f"average={fields['average']} must be set when the model is loaded: "
                f"convbert_jax.load({self.path!r}, average={fields['average']})."
            )
        given, single = as_single_texts(texts)
        decoding = change_decoding(self.config, fields).decoding
        answers = self._writer.write(given, decoding)
        for number, answer in enumerate(answers):
            if answer.problem:
                raise ArgumentError(f"texts[{number}] {answer.problem}.")
        several = decoding.n_best > 1
        found = [list(a.texts) if several else a.texts[0].text for a in answers]
        return found[0] if single else found
