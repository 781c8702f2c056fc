"""What can go wrong with a corpus or a vocabulary, in one sentence each."""

from convbert_jax.config import UserError


class DataError(UserError, ValueError):
    """A corpus that cannot be read, prepared or resumed."""


class TokenizerError(DataError):
    """A vocabulary that cannot be trained, read or trusted."""


def shorten(text: str, most: int = 120) -> str:
    """`text` for a sentence: cut to `most` characters if it is longer."""
    return text if len(text) <= most else text[: most - 1] + "…"
