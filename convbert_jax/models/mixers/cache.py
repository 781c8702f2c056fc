"""What attention keeps of the positions before, when rows are written one position at a time."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from convbert_jax.ops.attention import attention_to_kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of R rows in groups of J, as those of a beam, that stay where they are when
    the rows of a group change places: a row reads those of its whole group and sees, by `writer`,
    its own past. Moving them would be most of a beam search's time: at 128 positions, three times
    all else on a CPU.

    Attributes:
      key, value: the rows of a group side by side at each position, and the axes in the order in
        which products read them: a step adds its own and turns nothing over.
      writer: of each row and position of its text, which row of the group wrote it; -1: none yet.
    """

    key: Float[Array, "B H D LJ"]
    value: Float[Array, "B H LJ D"]
    writer: Int[Array, "B J L"]

    @classmethod
    def start(
        cls, rows: int, copies: int, length: int, heads: int, size: int, dtype: jnp.dtype
    ) -> "Cache":
        """Of `rows` rows in groups of `copies`, before the first of `length` positions."""
        groups, kept = rows // copies, length * copies
        return cls(
            jnp.zeros((groups, heads, size, kept), dtype),
            jnp.zeros((groups, heads, kept, size), dtype),
            jnp.full((groups, copies, length), -1, jnp.int32),
        )

    def take(self, rows: Int[Array, " R"], axis: int = 0) -> "Cache":
        """The cache with row `rows[r]` at place r, which is of the same group; as of an array."""
        writer = self.writer.reshape(-1, self.writer.shape[-1]).take(rows, axis=axis)
        return dataclasses.replace(self, writer=writer.reshape(self.writer.shape))

    def resize(self, positions: int) -> "Cache":
        """The cache with room for so many positions, and what stands in those of them it had."""
        copies = self.writer.shape[1]

        def fit(x, axis, size, empty):
            x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
            pads = [(0, size - n if at == axis else 0, 0) for at, n in enumerate(x.shape)]
            return jax.lax.pad(x, jnp.array(empty, x.dtype), pads)

        return Cache(
            fit(self.key, 3, positions * copies, 0),
            fit(self.value, 2, positions * copies, 0),
            fit(self.writer, 2, positions, -1),
        )

    def attend(
        self,
        query: Float[Array, "R 1 H D"],
        key: Float[Array, "R 1 H D"],
        value: Float[Array, "R 1 H D"],
        place: Int[Array, ""],
    ) -> tuple[Float[Array, "R 1 H D"], "Cache"]:
        """Causal attention of one position, whose key and value are kept; scores are float32."""
        groups, copies, length = self.writer.shape
        heads, size = query.shape[2:]

        def by_group(x):  # [B, H, J, D]
            return x.reshape(groups, copies, heads, size).swapaxes(1, 2)

        rows = jnp.arange(copies)
        own = jnp.broadcast_to(rows[:, None], (groups, copies, 1))
        put = jax.lax.dynamic_update_slice_in_dim
        kept = Cache(
            put(self.key, by_group(key).swapaxes(2, 3), place * copies, axis=3),
            put(self.value, by_group(value), place * copies, axis=2),
            put(self.writer, own, place, axis=2),
        )
        seen = (kept.writer[..., None] == rows).reshape(groups, 1, copies, length * copies)
        attended = attention_to_kept(by_group(query), kept.key, kept.value, seen)
        return attended.swapaxes(1, 2).reshape(query.shape), kept
