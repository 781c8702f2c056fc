"""The journal of a sweep: studies of Optuna in one file, which runners share."""

import contextlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.table import SweepError

# What Optuna raises of a journal whose lines are no JSON, or JSON of something else.
_DAMAGE = (
    *(json.JSONDecodeError, UnicodeDecodeError, KeyError, AssertionError),
    *(TypeError, AttributeError, IsADirectoryError),
)


def open_study(folder: Folder, name: str, *, maximize: bool = False) -> Any:
    """The study of this name (`optuna.Study`), begun if it is not there.

    Raises:
      SweepError: Optuna is not installed, or the journal is damaged.
    """
    try:
        import optuna
    except ImportError:
        raise SweepError(
            "sweeps need Optuna, which deals the cells to their runners: pip install optuna."
        ) from None
    from optuna.storages import journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    folder.path.mkdir(parents=True, exist_ok=True)
    # absolute: the lock is a link with this name, and is never broken if it leads nowhere
    path = folder.journal.absolute()
    if path.is_symlink():
        raise SweepError(f"{path} is a symbolic link. Replace it by the file itself.")
    lock = journal.JournalFileSymlinkLock(str(path))
    with explain(folder):
        _mend(path, lock)
        backend = journal.JournalFileBackend(str(path), lock_obj=lock)
        return optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=name,
            direction="maximize" if maximize else "minimize",
            load_if_exists=True,
        )


@contextlib.contextmanager
def explain(folder: Folder) -> Iterator[None]:
    """Context in which what Optuna makes of a damaged journal, or of none, is one sentence."""
    try:
        yield
    except FileNotFoundError as error:
        raise SweepError(
            f"{folder.journal} was deleted while a runner worked; start again: "
            "what is finished is kept in the folders of the cells."
        ) from error
    except _DAMAGE as error:
        searched = any((folder.path / "cells").glob("search-*"))
        advice = (
            "put a copy of it back, as the rows of a search are in it alone, or choose another "
            "--workdir."
            if searched
            else "delete it and start again: what is finished is kept in the folders of the cells."
        )
        raise SweepError(
            f"{folder.journal} is damaged ({type(error).__name__}); {advice}"
        ) from error


def end(study: Any, trial: Any, state: str, value: float | None = None) -> None:
    """Ends a trial, unless another runner was sooner: it may have given it up for dead.

    Args:
      state: name of an `optuna.trial.TrialState`; of "COMPLETE" alone there is a value.
    """
    from optuna.trial import TrialState

    with contextlib.suppress(RuntimeError):  # Optuna's UpdateFinishedTrialError
        study.tell(trial, value, state=TrialState[state], skip_if_finished=True)


def _mend(path: pathlib.Path, lock) -> None:
    """Takes away a last line that a full disk cut off; the next one would be spoiled by it."""
    if not path.exists() or path.read_bytes()[-1:] in (b"\n", b""):
        return
    lock.acquire()
    try:
        content = path.read_bytes()
        if content[-1:] not in (b"\n", b""):
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
    finally:
        lock.release()
