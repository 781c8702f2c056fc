"""What attention keeps of the positions before, when rows are written one position at a time."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from convbert_jax.ops.attention import attention_to_kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of R rows in groups of J, as those of a beam, that stay where they are when
    the rows of a group change places: a row reads those of its whole group and sees its own past.
    Moving them would be most of a beam search's time: at 128 positions, three times all else on a
    CPU. What no row sees any more is dropped by `pack`: rows of a beam soon have most of their past
    in common, so of L J entries little more than L are left to read.

    Attributes:
      key, value: N entries of each group, those of its rows side by side, and the axes in the order
        in which products read them: a step adds its own and turns nothing over.
      seen: of each row, which entries of its group are its past.
      used: how many entries are written; in a group that has fewer, those behind are seen by none.
    """

    key: Float[Array, "B H D N"]
    value: Float[Array, "B H N D"]
    seen: Bool[Array, "B J N"]
    used: Int[Array, ""]

    @classmethod
    def start(
        cls, rows: int, copies: int, length: int, heads: int, size: int, dtype: jnp.dtype
    ) -> "Cache":
        """Of `rows` rows in groups of `copies`, before the first of `length` positions."""
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
        """Of B x `copies` rows that go on from B prompts, to at most `length` positions: each entry
        of a prompt is there once, for all of its group, and that of padding is seen by none.
        """
        groups, begun = segment_ids.shape
        seen = jnp.broadcast_to((segment_ids != 0)[:, None], (groups, copies, begun))
        kept = cls(key.transpose(0, 2, 3, 1), value.swapaxes(1, 2), seen, jnp.int32(begun))
        return kept.resize(begun + (length - begun) * copies)

    @property
    def room(self) -> int:
        """N, the most entries of a group."""
        return self.seen.shape[2]

    @property
    def growth(self) -> int:
        """J, the entries that a step adds to a group."""
        return self.seen.shape[1]

    def take(self, rows: Int[Array, " R"], axis: int = 0) -> "Cache":
        """The cache with row `rows[r]` at place r, which is of the same group; as of an array."""
        seen = self.seen.reshape(-1, self.room).take(rows, axis=axis)
        return dataclasses.replace(self, seen=seen.reshape(self.seen.shape))

    def resize(self, room: int) -> "Cache":
        """The cache with room for so many entries, at least those that are used."""

        def fit(x, axis):
            x = jax.lax.slice_in_dim(x, 0, min(room, self.room), axis=axis)
            pads = [(0, max(0, room - self.room) if at == axis else 0, 0) for at in range(x.ndim)]
            return jax.lax.pad(x, jnp.zeros((), x.dtype), pads)

        return Cache(fit(self.key, 3), fit(self.value, 2), fit(self.seen, 2), self.used)

    def pack(self) -> "Cache":
        """The cache with the entries that a row sees in front, in their order, and no others."""
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
        """Causal attention of the next position, whose key and value are kept; scores are
        float32.
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
