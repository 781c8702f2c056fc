"""Several processes before they compile anything: who is here, with what, and who differs.

A run that begins with two configs, two jaxlibs or two corpora ends in a hang, in a trace of C++ or,
worse, in numbers that belong to no run. Each process says what it has; the first one compares, and
all say the same sentence.
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
from convbert_jax.training.environment import exchange
from convbert_jax.training.environment.devices import look_for_devices

_SOON = 120.0  # seconds to read a command line and the package
_DEVICES = 300.0  # seconds to find devices: a TPU takes a minute
_COPIED = 7_200.0  # seconds: each host copies what lies in a bucket
_ACCELERATORS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
# What a host may have its own of: places on its disk, and how fast it reads them.
_OF_HOST = (
    *("data.directory", "data.cache", "data.workers", "data.prefetch"),
    "train.compile_cache",
)
# What is compared, in this order, and what mends a difference.
REMEDIES = {
    "versions": "install the same versions on every host",
    "command": "start the same command on every host",
    "devices": "give every process as many devices of one kind",
    "data": "let all of them read the same files",
}
_MOST = 3  # fields that a sentence names
Record = Mapping[str, Mapping[str, Any]]  # what is compared -> name -> value


class RollCallError(UserError):
    """A process has something else than the others, or has fallen silent."""


def check_flags(flags: Mapping[str, Any]) -> None:
    """Compares what was typed beside the config; all processes call it once they are connected.

    Args:
      flags: name -> value.

    Raises:
      RollCallError: one process differs from the first, or does not answer in time.
      SilentProcessError: the first one does not.
    """
    _compare({"command": flags}, _SOON)


def check_start(config: Config | None) -> None:
    """Compares versions and configs, then devices, which nothing has looked for before; raises as
    `check_flags`.
    """
    if exchange.place()[1] == 1:
        return
    _compare({"versions": versions(), "command": fields(config) if config else {}}, _SOON)
    _compare({"devices": _devices()}, _DEVICES)


def check_data(config: Config, fingerprint: str) -> None:
    """Compares what each process is about to learn from, with all that it depends on, and logs on
    the first one who is here; raises as `check_flags`.

    Args:
      config: with what vocabulary and weights told.
      fingerprint: of the data.
    """
    index, count = exchange.place()
    if count == 1:
        return
    found = versions()
    record = {
        "versions": found,
        "command": fields(config),
        "devices": _devices(),
        "data": {"data": fingerprint[:16]},
    }
    _compare(record, _COPIED)
    if index == 0:
        logging.info(
            "%d processes: %d x %s devices, jax %s, same config, same data.",
            count,
            count,
            record["devices"]["devices"],
            found["jax"],
        )


def versions() -> dict[str, str]:
    """Of what programs are made by; of an accelerator's library "none" where it is not installed.

    Python's last number changes no program and is left out.
    """
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("jax", "jaxlib", *_ACCELERATORS):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    found["convbert_jax"] = f"{convbert_jax.__version__} (code {_digest_of_package()})"
    return found


def describe(records: Sequence[Record | None], limit: float) -> str:
    """One sentence of the first thing that is not the same on all, "" if everything is.

    Args:
      records: by number of the process; None of one that gave none within `limit` seconds.
    """
    silent = [index for index, record in enumerate(records) if record is None]
    if silent:
        return (
            f"{exchange.by_number(silent)} of {len(records)} said nothing for {limit:.0f} s after "
            "all had connected; look at the log and the host of each, end all processes and start "
            "them again."
        )
    for what, first in records[0].items():
        others = [record[what] for record in records]
        names = [n for n in first if any(other.get(n) != first[n] for other in others)]
        names += sorted({n for other in others for n in other} - first.keys())
        if names:
            parts = [_describe_name(name, others) for name in names[:_MOST]]
            if more := len(names) - _MOST:
                parts += [f"they differ in {more} more"] if more > 0 else []
            return f"{'; '.join(parts)}; {REMEDIES[what]}."
    return ""


def _describe_name(name: str, values: Sequence[Mapping[str, Any]]) -> str:
    """As "process 3 has config.seed=1, process 0 has 0"."""
    said = [_spell(each.get(name, "none")) for each in values]
    other = {text: [i for i, each in enumerate(said) if each == text] for text in said}
    other.pop(said[0])
    parts = [
        f"{exchange.by_number(who)} {'has' if len(who) == 1 else 'have'} {name}={text}"
        for text, who in other.items()
    ]
    return f"{' and '.join(parts)}, process 0 has {said[0]}"


def _spell(value: Any) -> str:
    text = str(value) or "''"
    if len(text) <= 80:
        return text
    return f"{text[:60]}… ({hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _compare(record: Record, limit: float) -> None:
    sentence = exchange.judge(record, functools.partial(describe, limit=limit), limit)
    if sentence:
        raise RollCallError(sentence)


def fields(config: Config) -> dict[str, Any]:
    """What all processes must have the same of a config: all but what is a host's own."""
    found = changes.flatten(to_dict(config))
    return {f"config.{name}": value for name, value in found.items() if name not in _OF_HOST}


def _devices() -> dict[str, str]:
    look_for_devices()
    found = jax.local_devices()
    kinds = sorted({device.device_kind for device in found})
    return {"devices": f"{len(found)} {' and '.join(kinds)}"}


@functools.cache
def _digest_of_package() -> str:
    """Of the sources, so that a checkout that somebody has changed is not taken for another."""
    digest = hashlib.sha256()
    root = pathlib.Path(convbert_jax.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:8]
