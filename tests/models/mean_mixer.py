"""Custom mixer, as a user of the package would write it."""

import dataclasses

import jax.numpy as jnp
from flax import nnx

from convbert_jax.config import ConfigError, plugins
from convbert_jax.interfaces import REPLICATED, Split
from convbert_jax.models.layers import Dense

NAME = "tests.models.mean_mixer:Mean"
plugins.allow([NAME])


@dataclasses.dataclass(frozen=True)
class Mean:
    """Mean over the segment, weighted per channel, followed by one dense layer."""

    gain: float = 1.0
    centered: bool = False  # without the token's own state

    RULES = ((r"weight", REPLICATED), (r"output/kernel", Split(tensor=-1)))

    @classmethod
    def make(cls, settings, **own):
        if own.get("gain") == 0:
            raise ConfigError(f"{settings.names['mixer_fields']}: gain=0 mixes nothing.")
        return cls(**own)

    def fields(self, hidden_size):
        return {}

    def module(self, hidden_size, initializers, rngs):
        return MeanOverSegment(self, hidden_size, initializers, rngs)

    def products(self, hidden_size, length):
        return 2 * hidden_size**2

    def elementwise(self, hidden_size, length):
        return 3 * hidden_size

    @property
    def reads_padding(self):
        return False


class MeanOverSegment(nnx.Module):
    def __init__(self, config, hidden_size, initializers, rngs):
        self.weight = nnx.Param(jnp.full(hidden_size, config.gain))
        self.output = Dense(hidden_size, hidden_size, initializers.dense, rngs)
        self.config = config

    def __call__(self, x, segment_ids, key=None, capture=None):
        same = (segment_ids[:, :, None] == segment_ids[:, None, :]).astype(x.dtype)
        mean = same @ x / same.sum(axis=-1, keepdims=True)
        if capture is not None:
            capture.offer("shares", lambda: same / same.sum(axis=-1, keepdims=True))
        if self.config.centered:
            mean = mean - x
        return self.output(mean * self.weight[...].astype(x.dtype))
