"""How parameters may be divided over devices, as models say it and training does it."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Split:
    """Divide a parameter: `tensor` names the dimension (from the end) that the tensor axis cuts,
    if any; fsdp cuts the largest of the other dimensions that it divides. A `table`, whose rows are
    looked up, it cuts along its rows alone, and leaves it whole where it does not divide them:
    devices with some columns each would send activations in place of it.
    """

    tensor: int | None = None
    table: bool = False


REPLICATED = None  # whole on every device

# (regular expression over parameter paths, how these are divided); the first that matches decides.
Rules = Sequence[tuple[str, Split | None]]
