"""The folder of one run: one process group at a time, one model and one corpus for good.

WORKDIR/config.json       the resolved config of the last start
WORKDIR/.lock             held while a run is alive; the system drops it when the process ends,
however it ends WORKDIR/data, tokenizer   prepared corpus (unless config.data.directory names
another folder) WORKDIR/checkpoints       Orbax WORKDIR/metrics.jsonl     one line per log interval
and evaluation; TensorBoard files beside it
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
from collections.abc import Iterator

from absl import logging

from convbert_jax.config import Config, UserError, to_dict


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
_FIXED_AFTER_ALL = ("train.batch_size",)  # the position in the data counts batches
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


def _keep_config(file: pathlib.Path, config: Config, path: pathlib.Path) -> None:
    new = to_dict(config)
    if file.exists():
        old = json.loads(file.read_text())
        changed = _differences(old, new)
        changeable = _CHANGEABLE_FINETUNING if config.recipe == "finetune" else _CHANGEABLE
        refused = {
            field: pair for field, pair in changed.items() if not _is_changeable(field, changeable)
        }
        if refused:
            raise WorkdirError(
                f"--workdir={path} holds a run with another config: {_describe(refused)}; choose "
                "another --workdir, "
                "or set these fields back."
            )
        if changed:
            logging.info("Config changed since the last start: %s.", _describe(changed))
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(new, indent=2) + "\n")
    temporary.replace(file)


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
    """Field -> (old, new) where they differ; a field that one side lacks is no difference."""
    old, new = _flatten(old), _flatten(new)
    return {name: (old[name], new[name]) for name in old if name in new and old[name] != new[name]}


def _describe(changes: dict[str, tuple[object, object]]) -> str:
    return ", ".join(
        f"config.{name} was {old!r}, now {new!r}" for name, (old, new) in changes.items()
    )
