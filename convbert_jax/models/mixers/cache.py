"""Key-value cache of self-attention for autoregressive decoding."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops.attention import attention_to_kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of R rows in groups of J rows, such as the beams of one text.

    All rows of a group share its entries, and each row has a mask of the entries that are its own
    past. Reordering the rows of a group therefore only permutes masks; keys and values are not
    copied, which would take most of the time of a beam search. `pack` drops entries that no row
    sees: beams soon share most of their past, so little more than L of L J entries remain.

    Attributes:
      key, value: N entries per group, interleaved by row, with axes in the order of the matrix
        products, so that a step appends its entries without a transpose.
      seen: Mask of the entries that are a row's past.
      used: Number of written entries; in groups with fewer, the remaining ones are masked.
    """

    key: Float[Array, "B H D N"]
    value: Float[Array, "B H N D"]
    seen: Bool[Array, "B J N"]
    used: Int[Array, ""]

    @classmethod
    def start(
        cls, rows: int, copies: int, length: int, heads: int, size: int, dtype: jnp.dtype
    ) -> "Cache":
        """Create an empty cache of `rows` rows in groups of `copies`, for `length` positions."""
        groups, room = rows // copies, length * copies
        return cls(
            jnp.zeros((groups, heads, size, room), dtype),
            jnp.zeros((groups, heads, room, size), dtype),
            jnp.zeros((groups, copies, room), bool),
            jnp.int32(0),
        )

    @classmethod
    def prefill(
        cls,
        key: Float[Array, "B P H D"],
        value: Float[Array, "B P H D"],
        segment_ids: Int[Array, "B P"],
        copies: int,
        length: int,
    ) -> "Cache":
        """Create the cache of B x `copies` rows that continue B prompts, up to `length` positions.

        A prompt's entries are stored once per group; padding is masked.
        """
        groups, begun = segment_ids.shape
        seen = jnp.broadcast_to((segment_ids != 0)[:, None], (groups, copies, begun))
        kept = cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), seen, jnp.int32(begun))
        return kept.resize(begun + (length - begun) * copies)

    @property
    def room(self) -> int:
        """N, the number of entries that fit into a group."""
        return self.seen.shape[2]

    @property
    def growth(self) -> int:
        """J, the number of entries that a step adds to a group."""
        return self.seen.shape[1]

    def take(self, rows: Int[Array, " R"], axis: int = 0) -> "Cache":
        """Reorder rows like `jnp.take`: row `rows[r]`, of the same group, becomes row r."""
        seen = self.seen.reshape(-1, self.room).take(rows, axis=axis)
        return dataclasses.replace(self, seen=seen.reshape(self.seen.shape))

    def resize(self, room: int) -> "Cache":
        """Grow or shrink the cache to `room` entries per group, at least those in use."""

        def fit(x, axis):
            x = jax.lax.slice_in_dim(x, 0, min(room, self.room), axis=axis)
            pads = [(0, max(0, room - self.room) if at == axis else 0, 0) for at in range(x.ndim)]
            return jax.lax.pad(x, jnp.zeros((), x.dtype), pads)

        return Cache(fit(self.key, 3), fit(self.value, 2), fit(self.seen, 2), self.used)

    def pack(self) -> "Cache":
        """Move visible entries to the front, in order, and drop all others."""
        live = self.seen.any(axis=1)
        order = jnp.argsort(~live, axis=1, stable=True)
        return Cache(
            jnp.take_along_axis(self.key, order[:, None, None], axis=3),
            jnp.take_along_axis(self.value, order[:, None, :, None], axis=2),
            jnp.take_along_axis(self.seen, order[:, None], axis=2),
            live.sum(axis=1, dtype=jnp.int32).max(),
        )

    def attend(
        self,
        query: Float[Array, "R 1 H D"],
        key: Float[Array, "R 1 H D"],
        value: Float[Array, "R 1 H D"],
    ) -> tuple[Float[Array, "R 1 H D"], "Cache"]:
        """Append the next position's key and value and compute its causal attention.

        Scores are float32.
        """
        groups, copies, _ = self.seen.shape
        heads, size = query.shape[2:]

        def by_group(x):  # [B, H, J, D]
            return x.reshape(groups, copies, heads, size).swapaxes(1, 2)

        own = jnp.broadcast_to(jnp.eye(copies, dtype=bool), (groups, copies, copies))
        put = jax.lax.dynamic_update_slice_in_dim
        kept = Cache(
            put(self.key, by_group(key).swapaxes(2, 3), self.used, axis=3),
            put(self.value, by_group(value), self.used, axis=2),
            put(self.seen, own, self.used, axis=2),
            self.used + copies,
        )
        attended = attention_to_kept(by_group(query), kept.key, kept.value, kept.seen[:, None])
        return attended.swapaxes(1, 2).reshape(query.shape), kept
