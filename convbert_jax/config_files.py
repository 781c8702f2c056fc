"""Config files: of the package, of the user, and the config.json of a run.

A file is JSON, or Python with a function get_config that returns a ConfigDict. `configs/NAME.py`,
or short NAME, is a file below the working directory, else the one of the installed package. In all
Python files `from configs import variants` finds the module of the package.
"""

import contextlib
import dataclasses
import errno
import importlib.util
import operator
import os
import pathlib
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import (
    Config,
    ConfigError,
    UserError,
    decided_by_run,
    fit_to_steps,
    from_config_dict,
    plugins,
)
from convbert_jax.config.checks import check_asked

_PACKAGE = "configs"
_OF_CONFIGS, _OF_SWEEPS = "get_config", "get_sweep"  # functions of a Python file
_HERE = pathlib.Path(__file__).resolve().parent
_IMPORTING = threading.RLock()  # reentrant, because a config file may load another one


def make_config(value: str, changed: Mapping[str, Any]) -> Config:
    """Returns the config of a file with overrides.

    With fewer steps than in a Python file, warm-up and intervals are shortened.

    Args:
      value: as in `load`.
      changed: path of a field, as "train.steps" -> value.

    Raises:
      UserError: as `load`, or the config is invalid.
    """
    values = load(value)
    from_config_dict(change({}, changed), check=False)  # reports invalid overrides first
    if value.endswith(".json"):  # of a run, whose intervals are kept
        config = from_config_dict(change(values, changed))
        check_asked(config, changed)
        if "train.steps" in changed and "train" not in config.spec.unread:
            _tell_intervals(config, value, changed)
        return config
    of_file = from_config_dict(values, check=False)
    fitted = fit_to_steps(of_file, changed)
    config = from_config_dict(change(values, {**fitted, **changed}))
    check_asked(config, changed)
    if fitted:
        logging.info(
            "Shortened for %s steps instead of the %s of %s: %s. Set any of them to override.",
            f"{config.train.steps:,}",
            f"{of_file.train.steps:,}",
            value,
            ", ".join(f"config.{path}={value}" for path, value in fitted.items()),
        )
    return config


def by_path(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Converts overrides of sections, {"train": {"steps": 50}}, to paths, {"train.steps": 50}.

    Fields that a section does not set are not overridden.
    """
    sections = {name for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)}
    flat = {}
    for path, value in changed.items():
        inside = value.to_dict() if hasattr(value, "to_dict") else value
        if path in sections and isinstance(inside, Mapping):
            flat |= {f"{path}.{field}": of_field for field, of_field in inside.items()}
        else:
            flat[path] = value
    return flat


def change(values: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested `values` of a config with some fields replaced.

    Args:
      changed: path of a field -> value.

    Raises:
      ConfigError: a section in `values` is not a mapping, or `changed` replaces a whole section.
    """
    result = dict(values)
    for path, value in changed.items():
        section, _, field = path.rpartition(".")
        if not section:
            if isinstance(value, Mapping) and isinstance(result.get(field), Mapping):
                raise ConfigError(
                    "is a section, whose other fields would be lost; set single fields, as "
                    f"'{field}.{next(iter(value), 'NAME')}'.",
                    field=f"config.{field}",
                )
            result[field] = value
            continue
        inside = result.get(section, {})
        if not isinstance(inside, Mapping):
            raise ConfigError(
                "is a section; it must be a mapping.", field=f"config.{section}", value=inside
            )
        result[section] = {**inside, field: value}
    return result


def load(value: str) -> dict[str, Any]:
    """Loads the nested values of a config.

    Args:
      value: FILE.py or FILE.py:VARIANT, whose `get_config()` or `get_config(VARIANT)` is called;
        NAME or NAME:VARIANT for configs/NAME.py; or FILE.json.

    Raises:
      UserError: the file does not exist, cannot be read, raises an error, or returns no config.
    """
    path, variant = _find(value)
    if path.suffix == ".json":
        if variant is not None:
            raise ConfigError(
                f"--config={value}: a JSON file has no variants; leave out :{variant}",
                field="--config",
                value=value,
            )
        return read_json(path)
    made = _call(value, path, () if variant is None else (variant,), _OF_CONFIGS)
    values = made.to_dict() if hasattr(made, "to_dict") else made
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"--config={value}: get_config of {path} returns a {type(made).__name__}; it must "
            "return a ConfigDict, as in the files in configs/.",
            field="--config",
            value=value,
        )
    plugins.allow(plugins.named(values))  # the user chose to execute this file
    return dict(values)


def load_sweep(value: str) -> Any:
    """Calls `get_sweep` of a Python file and returns the result.

    Args:
      value: FILE.py, FILE.py:VARIANT or NAME:VARIANT, as in `load`.

    Raises:
      UserError: the file does not exist, cannot be read, raises an error, or has no sweeps.
    """
    path, variant = _find(value, _OF_SWEEPS)
    if path.suffix == ".json":
        raise ConfigError(
            f"is a single run; use a Python file with {_OF_SWEEPS}.", field="--config", value=value
        )
    return _call(value, path, () if variant is None else (variant,), _OF_SWEEPS)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads the nested values of a config.json.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: it is not a JSON object.
    """
    remedy = (
        "restore a copy, or set --config to the config file; change fields on the command line, "
        "as --config.train.steps=1000"
    )
    return decided_by_run(storage.read_json(path, remedy=remedy, fields={}))


def choose_workdir(value: str | os.PathLike | None, config: Config | None) -> epath.Path:
    """Returns the folder of a run: `value`, or runs/NAME of its config.

    Raises:
      UserError: the path or name is invalid.
    """
    if not value:
        if config.name in ("", ".", "..") or "/" in config.name:
            raise ConfigError(
                "is not a valid folder name for runs/NAME; set the folder with --workdir.",
                field="config.name",
                value=config.name,
            )
        value = f"runs/{config.name}"
    return storage.to_path(value)


def known_files(function: str = _OF_CONFIGS) -> list[str]:
    """Returns the config files of the working directory and the package with this function."""
    found = {
        f"{_PACKAGE}/{path.name}"
        for folder in (pathlib.Path(_PACKAGE), _shipped())
        for path in folder.glob("*.py")
        if f"def {function}" in path.read_text(encoding="utf-8", errors="replace")
    }
    return sorted(found)


def _shipped() -> pathlib.Path:
    """Returns the configs of the package: inside an installed package, next to it in a checkout."""
    inside = _HERE / _PACKAGE
    return inside if inside.is_dir() else _HERE.parent / _PACKAGE


def _find(value: str, function: str = _OF_CONFIGS) -> tuple[epath.Path, str | None]:
    """Finds the file of a --config value; returns (file, variant or None)."""
    whole = storage.to_path(value)
    if _is_file(whole):  # a path may contain a colon: 2025-01-31T10:30, gs://BUCKET
        return whole, None
    name, colon, variant = value.partition(":")
    path = storage.to_path(name)
    tried = [path]
    if name and path.name == name and not path.suffix:
        tried.append(pathlib.Path(_PACKAGE, f"{name}.py"))
    if tried[-1].parent == pathlib.Path(_PACKAGE):
        tried.append(_shipped() / tried[-1].name)
    for file in tried:
        if _is_file(file):
            return file, variant if colon else None
    raise ConfigError(
        f"--config={value}: file {path} does not exist; known configs: "
        f"{', '.join(known_files(function))}.",
        field="--config",
        value=value,
    )


def _is_file(path: epath.Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


@contextlib.contextmanager
def _configs_importable(path: pathlib.Path) -> Iterator[None]:
    """Context in which the config file `path` can import `configs`.

    Files of the package import the package's `configs`; other files first import a `configs` on
    sys.path. The modules are reloaded for each file and removed at the end, because a notebook may
    have edited them and other projects may have a package of this name. A lock is held, because
    sys.modules is shared between threads.
    """

    def take() -> dict[str, types.ModuleType]:
        names = [n for n in sys.modules if n == _PACKAGE or n.startswith(f"{_PACKAGE}.")]
        return {name: sys.modules.pop(name) for name in names}

    with _IMPORTING:
        before, shipped = take(), _shipped()
        try:
            spec = None if path.parent.samefile(shipped) else importlib.util.find_spec(_PACKAGE)
            package = importlib.util.module_from_spec(spec) if spec else types.ModuleType(_PACKAGE)
            sys.modules[_PACKAGE] = package
            if spec and spec.loader:
                spec.loader.exec_module(package)
            package.__path__ = [*getattr(package, "__path__", ()), str(shipped)]
            yield
        finally:
            take()
            sys.modules.update(before)


def _call(value: str, path: pathlib.Path, arguments: tuple[str, ...], function: str):
    """Executes a Python file and calls one of its functions."""
    try:
        code = compile(path.read_bytes(), str(path), "exec")
    except OSError as error:
        raise ConfigError(
            f"--config={value}: {path} cannot be read: {error.strerror}.",
            field="--config",
            value=value,
        ) from error
    # ValueError: null bytes. RecursionError, MemoryError: deep nesting.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" at line {error.lineno}" if getattr(error, "lineno", None) else ""
        what = getattr(error, "msg", None) or error
        raise ConfigError(
            f"--config={value}: {path} is not valid Python ({what}{line}).",
            field="--config",
            value=value,
        ) from error
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    try:
        with _configs_importable(path):
            exec(code, module.__dict__)
            if not callable(getattr(module, function, None)):
                raise ConfigError(
                    f"--config={value}: {path} {_lacks(module, function)}.",
                    field="--config",
                    value=value,
                )
            return getattr(module, function)(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        first = (str(error).strip().splitlines() or ["no message"])[0][:200].rstrip(".")
        raise ConfigError(
            f"--config={value}: {path}{_line(error, path)} raises {type(error).__name__}: {first}.",
            field="--config",
            value=value,
        ) from error


def _lacks(module: types.ModuleType, function: str) -> str:
    if function == _OF_CONFIGS and hasattr(module, _OF_SWEEPS):
        return "is a sweep; start it with python launch/sweep.py"
    return f"has no function {function}; choose from: {', '.join(known_files(function))}"


def _line(error: BaseException, path: pathlib.Path) -> str:
    """Returns " line N", the innermost line of `path` in the traceback, or ""."""
    found, trace = "", error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == str(path):
            found = f" line {trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _tell_intervals(config: Config, file: str, changed: Mapping[str, Any]) -> None:
    """Logs which intervals are kept, because those of a trial may not suit a long run."""
    paths = ("optimizer.warmup_steps", "train.log_every", "train.eval_every", "checkpoint.every")
    kept = [
        f"config.{path}={operator.attrgetter(path)(config)}"
        for path in paths
        if path not in changed
    ]
    if kept:
        logging.info(
            "Kept from %s: %s. Set any of them, or use the config file, to change it.",
            file,
            ", ".join(kept),
        )
