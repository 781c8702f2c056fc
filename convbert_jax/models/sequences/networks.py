"""The models themselves: one decoder, or an encoder and a decoder, between tables of words.

    state, read = model.start(source, source_ids, copies=4, length=64)
    logits, state = model.step(tokens, state, place, read)  # of place 0, then 1, ...

gives what the model as a whole gives for the tokens up to there.
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
    """A decoder alone: each position tells the next token."""

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
        """Float32 logits of the token behind each.

        Args:
          segment_ids: 0 is padding; nothing flows from one segment to another.
          dtype: of the computation; parameters and logits are float32.
          key: draws dropout; None is deterministic.
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
        """The state behind all but the last token of each prompt, which are read at once, and what
        steps read besides; the first step is that of the last one, at place P - 1.

        Args:
          prompt: at least one token a row, the last one at place P - 1 of all rows.
          first: the place of each row's first token; what is before it is not read. None: 0.
          copies: rows that go on from each prompt, side by side, as of a beam.
          length: most places in all. With learned positions a text may have no more tokens than
            there are positions, wherever it begins.

        Raises:
          ValueError: there are no positions for the prompt and a token behind it.
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
        """Logits of the token behind the one at `place`, and the state behind it."""
        places = _of_rows(place, read, len(tokens))
        x = self.target.at(tokens, places, dtype)
        x, state = self.decoder.step(x, state, places, read)
        return self._words(x)[:, 0], state

    def _words(self, x):
        return to_words(x, self.target.word if self.config.tied_output else self.output)


class EncoderDecoder(nnx.Module):
    """Reads a source, writes a target; with a shared vocabulary by one table, `target`."""

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
        """Float32 logits of the token behind each of the target.

        Args:
          source_ids, segment_ids: 0 is padding. A segment of the target reads the segment of the
            source that has the same id, so that pairs may be packed.
          dtype, key: as in `LanguageModel`.
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
        """Hidden states of the encoder's last layer."""
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
        """The state before the first of at most `length` tokens, and what steps read besides.

        Args:
          source_ids: 1, and 0 for padding: one text a row.
          copies: rows of the target for each of the source, side by side, as of a beam.

        Raises:
          ValueError: there are no positions for so many tokens, of source or target.
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
        """Logits of the token behind the one at `place`, and the state behind it."""
        places = _of_rows(place, read, len(tokens))
        x = self.target.at(tokens, places, dtype)
        x, state = self.decoder.step(x, state, places, read)
        return self._words(x)[:, 0], state

    def _words(self, x):
        return to_words(x, self.target.word if self.config.tied_output else self.output)


def _of_rows(place: Int[Array, ""], read: Read, rows: int) -> Int[Array, " R"]:
    """The place in each row's own text."""
    return place - jnp.repeat(read.first, rows // len(read.first))


def _output(tokens, rngs: nnx.Rngs) -> Table:
    return Table(tokens.vocab_size, tokens.size, nnx.initializers.normal(tokens.size**-0.5), rngs)
