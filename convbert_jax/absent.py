"""A package that is not installed, in a sentence; needs none itself."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Context of the imports of a program: in a checkout into which nothing was installed, or with
    another environment active than the one that has it, they end it with a line and exit code 1.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "convbert_jax":
            raise
        sys.exit(
            f"error: the package {error.name} is not installed in {sys.prefix}; install what this "
            "needs, pip install -r requirements.txt, or activate the environment that has it."
        )
