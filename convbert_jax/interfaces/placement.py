"""Partition rules of parameters: models define them, training applies them."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Split:
    """Partitioning of one parameter.

    The fsdp axis shards the largest dimension that it divides, except `tensor`. It shards a `table`
    by rows or not at all, because sharded columns would require communication of activations.

    Attributes:
      tensor: dimension (negative) that the tensor axis shards; None: no dimension.
      table: whether the parameter is an embedding table, whose rows are looked up.
    """

    tensor: int | None = None
    table: bool = False


REPLICATED = None  # a full copy on every device

# (regular expression for parameter paths, partitioning); the first match applies.
Rules = Sequence[tuple[str, Split | None]]
