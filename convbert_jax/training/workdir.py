"""The folder of one run: one process group at a time, one model and one corpus for good.

WORKDIR/config.json     the resolved config of the last start
WORKDIR/.lock           held while a run is alive; the system drops it when the process ends
WORKDIR/data            tokenizer and shards, unless config.data.directory names another folder
WORKDIR/checkpoints     Orbax
WORKDIR/metrics.jsonl   one line per log interval and evaluation; TensorBoard files beside it

The first checkpoint or result is what binds a folder to its config. Until then every field may
change: a start that failed, or was stopped while it prepared, costs nothing but the next command.
Shards are kept from being mixed by their own record, see `data/corpus.py`.
"""

import contextlib
import fcntl
import os
import pathlib
import socket
from collections.abc import Iterator

from absl import logging

from convbert_jax import files
from convbert_jax.config import Config, ConfigError, UserError, from_config_dict, to_dict
from convbert_jax.training.checkpoint import list_steps

CONFIG = "config.json"
# Besides checkpoints, what a run may have made that another config must not go on with: finished
# runs of fine-tuning, and the one that is under way.
_MADE_BY_FINETUNING = ("results.jsonl", "unfinished/checkpoints")


class WorkdirError(UserError):
    """The folder cannot be used for this run."""


# What may change between two starts of one run: speed, reporting, and how long and how fast it
# learns.
_CHANGEABLE = (
    "platform",
    "compute_dtype",
    "model.attention",
    "model.convolution",
    "model.remat",
    "model.scan_unroll",
    "data.workers",
    "data.prefetch",
    "data.directory",
    "optimizer.",
    "train.",
    "checkpoint.",
    "mesh.",
)
_FIXED_AFTER_ALL = (
    "train.batch_size",  # the position in the data counts batches
    "optimizer.release_replicas",  # the gradient is so many times larger, Adam's moments are not
)
# Of a fine-tuning run: tasks and seeds may be added, what is finished stays as it is.
_CHANGEABLE_FINETUNING = (
    *(field for field in _CHANGEABLE if field != "optimizer."),
    "finetune.tasks",
    "finetune.data",
    "finetune.show_best",
    "finetune.seeds",
    "finetune.vectorize_seeds",
    "finetune.eval_batch_size",
    "finetune.save_models",
    "finetune.checkpoint_minutes",
)


@contextlib.contextmanager
def open_workdir(path: pathlib.Path, config: Config, *, writer: bool = True) -> Iterator[None]:
    """Locks `path` for this run and keeps its config; releases it at the end.

    Args:
      writer: False on all processes but the first, which does the writing for them.

    Raises:
      WorkdirError: the folder is not writable, is in use, or holds a run of another model or
      corpus.
    """
    if not writer:
        yield
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise WorkdirError(
            f"--workdir={path} cannot be written ({error.strerror}); choose a folder that can."
        ) from error
    try:
        _take_lock(lock, path)
        _keep_config(path / "config.json", config, path)
        yield
    finally:
        os.close(lock)


def _take_lock(lock: int, path: pathlib.Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(lock, 200).decode(errors="replace").strip() or "another process"
        raise WorkdirError(
            f"--workdir={path} is in use by {owner}; wait for it, stop it, or choose another "
            "--workdir."
        ) from error
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())


def read_config(path: pathlib.Path) -> Config:
    """The config that the run in `path` keeps.

    Raises:
      WorkdirError: there is no run.
      DamagedFileError: its config is damaged, or has fields that this version does not know.
    """
    remedy = "put it back from a copy, or use the version of convbert_jax that wrote it"
    try:
        return _read(path / CONFIG, remedy)
    except (FileNotFoundError, NotADirectoryError):
        raise WorkdirError(
            f"--workdir={path} holds no run ({CONFIG}: no such file); train one, or name another "
            "folder."
        ) from None


def is_bound(path: pathlib.Path) -> bool:
    """Whether a run in `path` has come so far that only what is changeable may change."""
    made = (path / name for name in _MADE_BY_FINETUNING)
    return bool(list_steps(path / "checkpoints")) or any(
        any(place.iterdir()) if place.is_dir() else place.is_file() and place.stat().st_size > 0
        for place in made
    )


def _read(file: pathlib.Path, remedy: str, *, check: bool = True) -> Config:
    """The config in a file, where a younger field has its default.

    Args:
      check: False takes one that cannot run, as the rules of an older version may have let it.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it is no config.
    """
    values = files.read_json(file, remedy=remedy, fields={})
    try:
        return from_config_dict(values, check=check)
    except ConfigError as error:
        raise files.damaged(file, str(error).rstrip("."), remedy) from None


def _keep_config(file: pathlib.Path, config: Config, path: pathlib.Path) -> None:
    new = to_dict(config)
    remedy = "choose another --workdir, or move this file away to go on with the config named now"
    try:
        changed = _differences(to_dict(_read(file, remedy, check=False)), new)
    except FileNotFoundError:
        changed = {}
    if is_bound(path):
        changeable = _CHANGEABLE_FINETUNING if config.recipe == "finetune" else _CHANGEABLE
        refused = {
            field: pair for field, pair in changed.items() if not _is_changeable(field, changeable)
        }
        if refused:
            raise WorkdirError(
                f"--workdir={path} holds a run with another config: {_describe(refused)}; choose "
                f"another --workdir{_with_its_shards(path, config, refused)}, or set these fields "
                "back."
            )
    if changed:
        logging.info("Config changed since the last start: %s.", _describe(changed))
    files.write_json(file, new)


def _with_its_shards(path: pathlib.Path, config: Config, refused) -> str:
    """How the start in another folder gets the shards of this one, where they may serve it."""
    ours = path / "data"
    touched = any(field.startswith(("data.", "tokenizer.", "recipe")) for field in refused)
    if touched or config.data.directory or not (ours / "metadata.json").is_file():
        return ""
    return f" with --config.data.directory={ours}, which uses the shards that are here"


def _is_changeable(field: str, changeable: tuple[str, ...]) -> bool:
    return field.startswith(changeable) and field not in _FIXED_AFTER_ALL


def _flatten(values: dict, prefix: str = "") -> dict[str, object]:
    flat = {}
    for name, value in values.items():
        flat |= (
            _flatten(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else {prefix + name: value}
        )
    return flat


def _differences(old: dict, new: dict) -> dict[str, tuple[object, object]]:
    """Field -> (old, new) where they differ."""
    old, new = _flatten(old), _flatten(new)
    return {name: (old[name], new[name]) for name in new if old[name] != new[name]}


def _describe(changes: dict[str, tuple[object, object]]) -> str:
    return ", ".join(
        f"config.{name} was {old!r}, now {new!r}" for name, (old, new) in changes.items()
    )
