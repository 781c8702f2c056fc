"""Error message for a package that is not installed; imports only the standard library."""

import contextlib
import pathlib
import sys
from collections.abc import Iterator

_CHECKOUT = pathlib.Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Turns a ModuleNotFoundError of the imports in its block into one line and exit code 1."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] == "convbert_jax":
            raise
        sys.exit(f"error: the package {error.name} is not installed in {sys.prefix}. {_advice()}")


def _advice() -> str:
    """Returns the fix: activate the checkout's inactive .venv, or install the requirements."""
    environment = _CHECKOUT / ".venv"
    if not (environment / "bin" / "activate").exists() or environment.samefile(sys.prefix):
        return (
            "Install the requirements (pip install -r requirements.txt), or activate the "
            "environment that has them."
        )
    folder = ".venv" if pathlib.Path.cwd() == _CHECKOUT else environment
    return f"Activate the environment of this checkout: source {folder}/bin/activate"
