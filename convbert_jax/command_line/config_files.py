"""--config: a Python file whose get_config makes a ConfigDict, or the config.json of a run."""

import pathlib
import types
from collections.abc import Mapping
from typing import Any

from convbert_jax import files
from convbert_jax.config import ConfigError, UserError


def load(value: str) -> dict[str, Any]:
    """Nested values of a config.

    Args:
      value: FILE.py or FILE.py:VARIANT, whose `get_config()` or `get_config(VARIANT)` is called;
        or FILE.json.

    Raises:
      UserError: there is no such file, it cannot be read, it raises, or it makes no config.
    """
    name, colon, variant = value.partition(":")
    if pathlib.Path(value).is_file():  # a colon may be in a path: runs/2025-01-31T10:30
        name, colon, variant = value, "", ""
    path = pathlib.Path(name)
    if not path.is_file():
        known = ", ".join(known_files()) or "no configs/ here, start from the repository"
        raise ConfigError(f"--config={value}: there is no file {path}; known configs: {known}.")
    if path.suffix == ".json":
        if colon:
            raise ConfigError(
                f"--config={value}: a JSON file has no variants; leave out :{variant}"
            )
        return read_json(path)
    made = _call(value, path, (variant,) if colon else ())
    values = made.to_dict() if hasattr(made, "to_dict") else made
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"--config={value}: get_config of {path} returns a {type(made).__name__}; let it "
            "return a ConfigDict, as the files in configs/ do."
        )
    return dict(values)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Nested values of a config.json.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it is no JSON object.
    """
    remedy = "put a copy back, or name the config file with --config"
    return files.read_json(path, remedy=remedy, fields={})


def known_files() -> list[str]:
    """The config files below the working directory."""
    return sorted(
        str(path)
        for path in pathlib.Path("configs").glob("*.py")
        if "def get_config" in path.read_text(encoding="utf-8", errors="replace")
    )


def _call(value: str, path: pathlib.Path, arguments: tuple[str, ...]):
    """What get_config of a Python file returns."""
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError(f"--config={value}: {path} cannot be read: {error.strerror}.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of zeros, of nesting
        line = f" at line {error.lineno}" if getattr(error, "lineno", None) else ""
        what = getattr(error, "msg", None) or error
        raise ConfigError(f"--config={value}: {path} is not Python ({what}{line}).") from error
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        exec(code, module.__dict__)
        if not callable(getattr(module, "get_config", None)):
            raise ConfigError(
                f"--config={value}: {path} has no function get_config; take one of: "
                f"{', '.join(known_files())}."
            )
        return module.get_config(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or ["no message"])[0][:200].rstrip(".")
        raise ConfigError(
            f"--config={value}: {path}{_line(error, path)} raises {type(error).__name__}: {first}."
        ) from error


def _line(error: BaseException, path: pathlib.Path) -> str:
    """The innermost line of `path` that an error came through."""
    found, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            found = f" line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
