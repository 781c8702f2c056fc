"""A run of a model that writes text, applied to texts; made by `convbert_jax.load`."""

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
    """Weights, and the vocabularies of what is read and written.

    Attributes:
      path: folder of the run.
      config: of the run.
      step: steps it was trained for.
      tokenizers: of what is read and of what is written.
    """

    def __init__(self, path: str, config: Config, step: int | None, *, dtype: jnp.dtype):
        """
        Args:
          step: of the checkpoint, None for the newest.
          dtype: of the computation; scores are float32.

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
        """`write`, which is `translate` and `summarize` too, by the recipe."""
        return ("write",)

    def translate(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Translations.

        Args:
          texts: texts in the source's language; a single string is one text.
          decoding: other fields of config.decoding, as `beam=8`, `method="greedy"` or `n_best=4`.

        Returns:
          of each text its translation; with n_best=N above 1 the up to N best ones as a list of
          (text, score), of which the score is the log probability over the tokens to the power of
          length_penalty. Of a single text that alone.

        Raises:
          ModelError: it is no run of translation.
          ArgumentError: something else than texts, or a text that cannot be read, as an empty one
            or one that is too long.
          ConfigError: decoding that cannot be.

        >>> translator = convbert_jax.load("runs/pairs")
        >>> len(translator.translate(["a text", "another"]))
        2
        >>> best, *_ = translator.translate("a text", beam=3, n_best=2)
        >>> best.score <= 0
        True
        """
        return self._write("translation", "translate", texts, decoding)

    def summarize(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """Summaries; arguments, returns and errors as of `translate`."""
        return self._write("summarization", "summarize", texts, decoding)

    def write(self, texts: str | Sequence[str], **decoding: Any) -> Any:
        """What the model writes to texts, of any recipe: with text_to_text its answers, with
        causal_lm the texts with what follows them, with span_corruption the texts with every [MASK]
        filled in. Arguments, returns and errors as of `translate`; a prompt may be empty.
        """
        return self._write(self.config.recipe, "write", texts, decoding)

    def encode(self, *_: Any, **__: Any) -> None:
        """Raises ModelError: vectors are what encoders are for."""
        raise ModelError(
            f"{self.path} is a run of config.recipe='{self.config.recipe}', which writes text and "
            "has no vectors of texts; load a run of an encoder.",
            path=self.path,
        )

    def _write(self, recipe: str, name: str, texts, fields: dict[str, Any]) -> Any:
        own = {"translation": "translate", "summarization": "summarize"}
        if self.config.recipe != recipe:
            fitting = own.get(self.config.recipe, "write")
            raise ModelError(
                f"{self.path} is a run of config.recipe='{self.config.recipe}'; call "
                f"{fitting}() of it instead of {name}().",
                path=self.path,
            )
        if "average" in fields:
            raise ModelError(
                f"average={fields['average']} is of the checkpoints that are loaded; set it there: "
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
