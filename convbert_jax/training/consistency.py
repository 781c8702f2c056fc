"""Checks before the first compilation that all processes have the same versions, config and data.

A run with two configs, two versions of jaxlib or two corpora would hang, abort with a C++ stack
trace or, worse, train on numbers that belong to no config. Process 0 compares; all processes raise
the same error.
"""

import functools
import hashlib
import importlib.metadata
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from absl import logging

import convbert_jax
from convbert_jax.config import Config, UserError, changes, to_dict
from convbert_jax.training import distributed
from convbert_jax.training.environment import look_for_devices

_READ_TIMEOUT = 120.0  # seconds to read a command line and the package
_DEVICE_TIMEOUT = 300.0  # seconds to find devices: a TPU takes a minute
_COPY_TIMEOUT = 7_200.0  # seconds: each host copies the data from a bucket
_ACCELERATORS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# Fields that may differ: paths on the host's disk, and how fast it reads them.
_PER_HOST = (
    *("data.directory", "data.cache", "data.workers", "data.prefetch"),
    "train.compile_cache",
)
# Parts of a record, in the order of comparison, and the fix of a difference.
FIXES = {
    "versions": "Install the same versions on every host.",
    "command": "Start the same command on every host.",
    "devices": "Give every process the same number of devices of one kind.",
    "data": "Give every process the same files.",
}
_MAX_FIELDS = 3  # maximum number in an error
Record = Mapping[str, Mapping[str, Any]]  # part -> name -> value


class InconsistencyError(UserError):
    """A process differs from process 0, or does not answer."""


def check_flags(flags: Mapping[str, Any]) -> None:
    """Compares flags outside of the config; all processes call it.

    Args:
      flags: name -> value.

    Raises:
      InconsistencyError: a process differs from process 0, or does not answer in time.
      SilentProcessError: process 0 does not answer.
    """
    _compare({"command": flags}, _READ_TIMEOUT)


def check_start(config: Config | None) -> None:
    """Compares versions and configs, then initializes and compares devices.

    Raises:
      InconsistencyError, SilentProcessError: as `check_flags`.
    """
    if distributed.place()[1] == 1:
        return
    command = fields(config) if config else {}
    _compare({"versions": versions(), "command": command}, _READ_TIMEOUT)
    _compare({"devices": _devices()}, _DEVICE_TIMEOUT)


def check_data(config: Config, fingerprint: str) -> None:
    """Compares the training data and all other parts, and logs the result on process 0.

    Args:
      config: with its vocabulary and initial weights read.
      fingerprint: of the data.

    Raises:
      InconsistencyError, SilentProcessError: as `check_flags`.
    """
    index, count = distributed.place()
    if count == 1:
        if jax.distributed.is_initialized() and not distributed.is_connected():
            raise InconsistencyError(
                "JAX has connected several processes, but convbert_jax has not. Start the program "
                "with --multihost or --coordinator instead of calling jax.distributed.initialize."
            )
        return
    found = versions()
    record = {
        "versions": found,
        "command": fields(config),
        "devices": _devices(),
        "data": {"data": fingerprint[:16]},
    }
    _compare(record, _COPY_TIMEOUT)
    if index == 0:
        logging.info(
            "%d processes: %d x %s devices, jax %s, same config, same data.",
            count,
            count,
            record["devices"]["devices"],
            found["jax"],
        )


def versions() -> dict[str, str]:
    """Returns the versions that programs depend on; "none" for a package that is not installed.

    Python's patch version is excluded, because it does not affect programs.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("jax", "jaxlib", *_ACCELERATORS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    found["convbert_jax"] = f"{convbert_jax.__version__} (code {_digest_of_package()})"
    return found


def find_difference(records: Sequence[Record | None], timeout: float) -> dict[str, Any] | None:
    """Returns the arguments of an error about the first part that differs, None if none does.

    Args:
      records: by process number; None if there was no record within `timeout` seconds.
    """
    silent = [index for index, record in enumerate(records) if record is None]
    if silent:
        who = _capitalize(distributed.name_processes(silent))
        message = (
            f"{who} of {len(records)} did not answer within {timeout:.0f} s after connecting. Look "
            "at the log and the host of each, end all processes and start them again."
        )
        return {"message": message}
    for part, first in records[0].items():
        others = [record[part] for record in records]
        names = [n for n in first if any(other.get(n) != first[n] for other in others)]
        names += sorted({n for other in others for n in other} - first.keys())
        if names:
            differences = [_describe_field(name, others) for name in names[:_MAX_FIELDS]]
            if len(names) > _MAX_FIELDS:
                differences.append(f"they differ in {len(names) - _MAX_FIELDS} more")
            message = f"{_capitalize('; '.join(differences))}. {FIXES[part]}"
            return {"message": message, "field": names[0]}
    return None


def fields(config: Config) -> dict[str, Any]:
    """Returns the fields of a config that must be the same on all processes."""
    found = changes.flatten(to_dict(config))
    return {f"config.{name}": value for name, value in found.items() if name not in _PER_HOST}


def _describe_field(name: str, values: Sequence[Mapping[str, Any]]) -> str:
    """Returns, for example, "process 3 has config.seed=1, process 0 has 0"."""
    spelled = [_spell(each.get(name, "none")) for each in values]
    other = {text: [i for i, each in enumerate(spelled) if each == text] for text in spelled}
    other.pop(spelled[0])
    parts = [
        f"{distributed.name_processes(who)} {'has' if len(who) == 1 else 'have'} {name}={text}"
        for text, who in other.items()
    ]
    return f"{' and '.join(parts)}, process 0 has {spelled[0]}"


def _spell(value: Any) -> str:
    text = str(value) or "''"
    if len(text) <= 80:
        return text
    return f"{text[:60]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _capitalize(text: str) -> str:
    return text[0].upper() + text[1:]


def _compare(record: Record, timeout: float) -> None:
    find = functools.partial(find_difference, timeout=timeout)
    if difference := distributed.decide(record, find, timeout):
        raise InconsistencyError(**difference)


def _devices() -> dict[str, str]:
    look_for_devices()
    found = jax.local_devices()
    kinds = sorted({device.device_kind for device in found})
    return {"devices": f"{len(found)} {' and '.join(kinds)}"}


@functools.cache
def _digest_of_package() -> str:
    """Hashes the sources, so that a modified checkout counts as another version."""
    digest = hashlib.sha256()
    root = pathlib.Path(convbert_jax.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]
