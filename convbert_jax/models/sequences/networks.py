"""Complete models: a decoder, or an encoder and a decoder, with embeddings and output logits.

    state, read = model.start(source, source_ids, copies=4, length=64)
    logits, state = model.step(tokens, state, place, read)  # place 0, then 1, ...

Steps return the same logits as the whole model applied to the tokens so far.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config.sequences import EncoderDecoderConfig, LanguageModelConfig
from convbert_jax.models.embeddings import Table
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import State
from convbert_jax.models.sequences.decoder import Decoder, Read
from convbert_jax.models.sequences.tokens import Tokens, to_words


class LanguageModel(nnx.Module):
    """Decoder-only language model: each position predicts the next token."""

    def __init__(self, config: LanguageModelConfig, rngs: nnx.Rngs):
        self.target = Tokens(config.tokens, rngs)
        self.decoder = Decoder(config.decoder, rngs)
        if not config.tied_output:
            self.output = _output(config.tokens, rngs)
        self.config = config

    def __call__(
        self,
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L V"]:
        """Return float32 logits of the token after each position.

        Args:
          segment_ids: 0 marks padding; positions of different segments do not interact.
          dtype: Compute dtype; parameters and logits are float32.
          key: Dropout key; None is deterministic.
        """
        keys = [None] * 2 if key is None else jax.random.split(key)
        x = self.target(tokens, segment_ids, dtype=dtype, key=keys[0])
        return self._words(self.decoder(x, segment_ids, key=keys[1]))

    def start(
        self,
        prompt: Int[Array, "B P"],
        first: Int[Array, " B"] | None = None,
        *,
        copies: int,
        length: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[tuple[State, ...], Read]:
        """Process all but the last token of each prompt, and prepare decoding.

        The first step is then the prompt's last token, at place P - 1.

        Args:
          prompt: At least one token per row; every row ends at place P - 1.
          first: Index of each row's first token; earlier places are padding. None means 0.
          copies: Number of adjacent rows that continue each prompt, such as beams.
          length: Maximum number of places. With learned positions, a text is limited to as many
            tokens as there are positions, wherever it begins.

        Returns:
          The decoding state, and the constant inputs of the steps.

        Raises:
          ValueError: The prompt and one more token exceed the position embedding matrix.
        """
        self.target.check_length(prompt.shape[1] + 1)
        first = jnp.zeros(len(prompt), jnp.int32) if first is None else first
        read, before = self.decoder.read(first), prompt[:, :-1]
        if not before.shape[1]:
            return self.decoder.start(len(prompt) * copies, length, dtype, copies), read
        segment_ids = (jnp.arange(before.shape[1]) >= first[:, None]).astype(jnp.int32)
        x = self.target(before, segment_ids, dtype=dtype)
        return self.decoder.prefill(x, segment_ids, length, copies), read

    def step(
        self,
        tokens: Int[Array, " R"],
        state: tuple[State, ...],
        place: Int[Array, ""],
        read: Read,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[Float[Array, "R V"], tuple[State, ...]]:
        """Return logits of the token after the one at `place`, and the state after it."""
        places = _of_rows(place, read, len(tokens))
        x = self.target.at(tokens, places, dtype)
        x, state = self.decoder.step(x, state, places, read)
        return self._words(x)[:, 0], state

    def _words(self, x):
        return to_words(x, self.target.word if self.config.tied_output else self.output)


class EncoderDecoder(nnx.Module):
    """Encoder-decoder; with a shared vocabulary, `target` embeds the source too."""

    def __init__(self, config: EncoderDecoderConfig, rngs: nnx.Rngs):
        self.target = Tokens(config.target, rngs)
        if not config.shared_vocabulary:
            self.source = Tokens(config.source, rngs)
        self.encoder = Encoder(config.encoder, rngs)
        self.decoder = Decoder(config.decoder, rngs)
        if not config.tied_output:
            self.output = _output(config.target, rngs)
        self.config = config

    def __call__(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        tokens: Int[Array, "B L"],
        segment_ids: Int[Array, "B L"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B L V"]:
        """Return float32 logits of the token after each target position.

        Args:
          source_ids, segment_ids: 0 marks padding. A target segment attends to the source segment
            with the same id, so pairs can be packed.
          dtype, key: As in `LanguageModel`.
        """
        keys = [None] * 3 if key is None else jax.random.split(key, 3)
        encoded = self.encode(source, source_ids, dtype=dtype, key=keys[0])
        x = self.target(tokens, segment_ids, dtype=dtype, key=keys[1])
        return self._words(self.decoder(x, segment_ids, encoded, source_ids, keys[2]))

    def encode(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        *,
        dtype: jnp.dtype = jnp.float32,
        key: Array | None = None,
    ) -> Float[Array, "B S C"]:
        """Compute the hidden states of the encoder's last layer."""
        keys = [None] * 2 if key is None else jax.random.split(key)
        table = self.target if self.config.shared_vocabulary else self.source
        x = table(source, source_ids, dtype=dtype, key=keys[0])
        return self.encoder(x, source_ids, keys[1])

    def start(
        self,
        source: Int[Array, "B S"],
        source_ids: Int[Array, "B S"],
        *,
        copies: int,
        length: int,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[tuple[State, ...], Read]:
        """Encode the source, and prepare decoding of at most `length` tokens.

        Args:
          source_ids: 1 for tokens, 0 for padding; one text per row.
          copies: Number of adjacent target rows per source row, such as beams.

        Returns:
          The decoding state, and the constant inputs of the steps.

        Raises:
          ValueError: Source or target exceed the position embedding matrix.
        """
        self.target.check_length(length)
        encoded = self.encode(source, source_ids, dtype=dtype)
        state = self.decoder.start(len(source) * copies, length, dtype, copies)
        first = jnp.zeros(len(source), jnp.int32)
        return state, self.decoder.read(first, encoded, source_ids)

    def step(
        self,
        tokens: Int[Array, " R"],
        state: tuple[State, ...],
        place: Int[Array, ""],
        read: Read,
        dtype: jnp.dtype = jnp.float32,
    ) -> tuple[Float[Array, "R V"], tuple[State, ...]]:
        """Return logits of the token after the one at `place`, and the state after it."""
        places = _of_rows(place, read, len(tokens))
        x = self.target.at(tokens, places, dtype)
        x, state = self.decoder.step(x, state, places, read)
        return self._words(x)[:, 0], state

    def _words(self, x):
        return to_words(x, self.target.word if self.config.tied_output else self.output)


def _of_rows(place: Int[Array, ""], read: Read, rows: int) -> Int[Array, " R"]:
    """Return the position within each row's own text."""
    return place - jnp.repeat(read.first, rows // len(read.first))


def _output(tokens, rngs: nnx.Rngs) -> Table:
    return Table(tokens.vocab_size, tokens.size, nnx.initializers.normal(tokens.size**-0.5), rngs)
