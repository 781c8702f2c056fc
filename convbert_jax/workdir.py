"""The folder of a run, used by one process group at a time, for one model and one corpus.

WORKDIR/config.json     resolved config of the last start
WORKDIR/.lock           held while a run is alive; in a bucket, see `BucketLock`
WORKDIR/data            tokenizer and shards, unless config.data.directory sets another folder
WORKDIR/checkpoints     Orbax
WORKDIR/vocabulary      copies of the vocabularies, so the folder can be moved
WORKDIR/metrics.jsonl   one line per log interval and evaluation; also TensorBoard files
WORKDIR/curves.png      plot of the metrics; evaluation/, huggingface/, inside/, profile/ on request
WORKDIR/report.html     summary of the run for a browser, for every recipe

Fine-tuning:

WORKDIR/results.jsonl   one line per finished run; table.md with all runs, glue_server/seed-N
WORKDIR/unfinished      the current run
WORKDIR/TASK/seed-N     a model: its own run folder, with predictions/

After the first checkpoint or result only `Changeable` fields of the config may change. The metadata
of the shards prevents mixing different data, see `data/corpus.py`.

A folder may be in a bucket (gs://BUCKET/RUN); tokenizer and shards are read from a local disk.
"""

import contextlib
import datetime
import os
import pathlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping

from absl import logging
from etils import epath

from convbert_jax import storage
from convbert_jax.config import (
    Config,
    ConfigError,
    PluginError,
    UserError,
    changes,
    decided_by_run,
    from_config_dict,
    to_dict,
)

HEARTBEAT = 15.0  # seconds between two heartbeats in a bucket
# Seconds; long enough that an outage of a minute does not lose the folder.
HEARTBEAT_TIMEOUT = 120.0


class OwnershipError(UserError):
    """Another process owns the folder."""


def this_process() -> str:
    """Returns the process id and host name."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def wait_for_owner(place: epath.Path) -> None:
    """Waits until the folder of the lock file `place` has no owner.

    Returns at once if there is no lock file or its owner was a process on this machine that ended,
    else after at most `HEARTBEAT_TIMEOUT` seconds.

    Raises:
      OwnershipError: the owner is alive.
    """
    found = _read_lock(place)
    if not found:
        return
    if _is_gone_from_here(found):
        logging.warning(
            "--workdir=%s was opened by %s, which no longer runs on this machine; taking over the "
            "folder.",
            place.parent,
            _name_in(found),
        )
        return
    logging.warning(
        "--workdir=%s was opened by %s and not closed; waiting for a heartbeat for %.0f s.",
        place.parent,
        _name_in(found),
        HEARTBEAT_TIMEOUT,
    )
    begin = time.monotonic()
    while time.monotonic() - begin < HEARTBEAT_TIMEOUT:
        time.sleep(min(1.0, HEARTBEAT_TIMEOUT / 10))
        now = _read_lock(place)
        if not now:
            return
        if now != found:
            raise OwnershipError(
                f"is in use by {_name_in(now)}, which sends a heartbeat every {HEARTBEAT:.0f} "
                "s; wait for it, stop it, or choose another --workdir. After "
                f"{HEARTBEAT_TIMEOUT:.0f} s without a heartbeat the folder can be used again.",
                field="--workdir",
                value=str(place.parent),
            )
    logging.warning("No heartbeat; taking over the folder.")


class BucketLock:
    """Exclusive ownership of a folder in a bucket, which has no locks, by heartbeats.

    FOLDER/.lock names the owner and contains a token that changes every `HEARTBEAT` seconds. A new
    process that finds the file watches the token: if it changes, the folder is in use and the start
    fails; after `HEARTBEAT_TIMEOUT` seconds without a change the owner is considered dead. Clocks
    are not compared between machines. The owner also records its process id and machine if it is
    the only process of its run, so a start on the same machine detects at once that it is gone.

    If two processes start at the same time, both write the file. The one whose name is overwritten
    stops at its next heartbeat or before its next checkpoint, whichever is first.
    """

    def __init__(self, place: epath.Path, *, alone: bool):
        """
        Args:
          place: the lock file.
          alone: whether this is the only process of the run; other processes could still write
            after this one ended.
        """
        self._place = place
        self._here = _describe_here() if alone else ""
        self._id = secrets.token_hex(8)
        now = datetime.datetime.now(datetime.UTC)
        self._name = f"{this_process()} since {now:%Y-%m-%d %H:%M:%S} UTC"

    @contextlib.contextmanager
    def holding(self) -> Iterator[None]:
        """Context in which a thread sends heartbeats; its end releases the folder.

        Raises:
          OSError: the first heartbeat cannot be written.
        """
        self._give_sign()
        over = threading.Event()
        thread = threading.Thread(target=self._live, args=(over,), daemon=True, name="owner")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            try:
                if self._is_named():
                    self._place.unlink(missing_ok=True)
            except Exception as error:  # storage libraries raise different types
                logging.warning(
                    "Could not remove %s (%s); the next start will wait %.0f s.",
                    self._place,
                    error,
                    HEARTBEAT_TIMEOUT,
                )

    def check(self) -> None:
        """Checks that this process still owns the folder.

        Raises:
          OwnershipError: the folder was taken over.
        """
        found = _read_lock(self._place)
        if not found:  # another process took over the folder and ended
            raise OwnershipError(
                f"is no longer owned by this process ({self._name}): {self._place.name} was "
                "removed, probably by another run that took over the folder and ended. Start "
                "again to resume from the saved state.",
                field="--workdir",
                value=str(self._place.parent),
            )
        if self._id not in found:
            raise OwnershipError(
                f"was taken over by {_name_in(found)}: this process ({self._name}) sent no "
                f"heartbeat for {HEARTBEAT_TIMEOUT:.0f} s, or both started at the same time. This "
                "process stops saving checkpoints; use the folder for one run at a time.",
                field="--workdir",
                value=str(self._place.parent),
            )

    def _live(self, over: threading.Event) -> None:
        while not over.wait(HEARTBEAT):
            try:
                if not self._is_named():
                    return  # `check` raises the error
                self._give_sign()
            except Exception as error:  # storage libraries raise different types
                logging.warning("Could not renew %s (%s); will retry.", self._place, error)

    def _give_sign(self) -> None:
        # Constant length, because a library that caches file sizes would truncate a longer text.
        sign = f"{self._name}\n{self._id} {secrets.token_hex(8)}\n{self._here}\n"
        self._place.write_text(sign)

    def _is_named(self) -> bool:
        return self._id in _read_lock(self._place)


def _name_in(text: str) -> str:
    return text.partition("\n")[0]


def _is_gone_from_here(text: str) -> bool:
    """Returns whether the owner was a process on this machine that has ended."""
    machine, _, of_process = "".join(text.splitlines()[2:3]).partition(", process ")
    if not machine or machine != _describe_machine():
        return False
    pid, _, began = of_process.partition(" begun ")
    try:
        os.kill(int(pid), 0)
        return _begin_of(int(pid)) != began  # another process has the same id
    except ProcessLookupError:
        return True
    except (OSError, ValueError):  # a process of another user, or another format
        return False


def _describe_here() -> str:
    """Identifies this process on this machine; "" if the system does not provide it."""
    machine = _describe_machine()
    return machine and f"{machine}, process {os.getpid()} begun {_begin_of(os.getpid())}"


def _describe_machine() -> str:
    """Identifies the scope in which process ids are unique: boot and PID namespace (container)."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _begin_of(pid: int) -> str:
    """Returns the start time of a process in clock ticks since boot; "" for a zombie process."""
    state, *fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _read_lock(place: epath.Path) -> str:
    """Returns the content of the lock file, "" if it does not exist."""
    try:
        return place.read_text()
    except FileNotFoundError:
        return ""


# Orbax writes it last into a checkpoint in a bucket, where folders cannot be renamed.
_COMMITTED = "commit_success.txt"
_CHANGE = "change fields on the command line, as --config.train.steps=1000"
# Seconds after which temporary files are removed; --mode=eval and export write without the lock.
_ABANDONED = 3600.0


class WorkdirError(UserError):
    """The folder cannot be used for this run."""


class Workdir:
    """Paths and state of a run folder. The constructor does not access the folder."""

    def __init__(self, path: epath.PathLike):
        self.path = storage.to_path(path)
        self._owner: BucketLock | None = None  # while a folder in a bucket is open for writing

    def __str__(self) -> str:
        return str(self.path)

    @property
    def config(self) -> epath.Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> epath.Path:
        return self.path / "checkpoints"

    @property
    def teacher(self) -> epath.Path:
        """Fingerprint of the teacher's weights; only exists with a teacher."""
        return self.path / "teacher.json"

    @property
    def metrics(self) -> epath.Path:
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> epath.Path:
        return self.path / "curves.png"

    @property
    def report(self) -> epath.Path:
        """Summary of the run, written at its end or when it is interrupted."""
        return self.path / "report.html"

    @property
    def profile(self) -> epath.Path:
        return self.path / "profile"

    def data(self, config: Config) -> epath.Path:
        """Returns the folder of tokenizer and shards; for buckets see `data/bucket.py`."""
        named = config.data.directory
        return storage.to_path(named) if named else self._shards

    @property
    def _shards(self) -> epath.Path:
        return self.path / "data"

    def evaluation(self, step: int) -> epath.Path:
        """Returns the file with the held-out metrics of a checkpoint."""
        return self.path / "evaluation" / f"step-{step}.json"

    def inside(self, step: int) -> epath.Path:
        """Returns the folder with plots of attention maps and filters of a checkpoint."""
        return self.path / "inside" / f"step-{step}"

    def export(self, form: str, step: int) -> epath.Path:
        """Returns the folder of an exported checkpoint; `form` as "huggingface"."""
        return self.path / form / f"step-{step}"

    def trial(self, name: str) -> "Workdir":
        """Returns the folder of a run of --mode=verify_resume."""
        return Workdir(self.path / "verify_resume" / name)

    def bad_batch(self, step: int, process: int) -> epath.Path:
        """Returns the file with the batch of a step with non-finite loss or gradients."""
        return self.path / f"bad_batch_step_{step}_process_{process}.npz"

    @property
    def tracker(self) -> epath.Path:
        """Id of this run in an experiment tracker."""
        return self.path / "tracker.json"

    @property
    def skipped(self) -> epath.Path:
        """Batches that a run skips after a rollback."""
        return self.path / "skipped_batches.json"

    # Fine-tuning

    @property
    def results(self) -> epath.Path:
        return self.path / "results.jsonl"

    @property
    def table(self) -> epath.Path:
        return self.path / "table.md"

    @property
    def unfinished(self) -> "Workdir":
        return Workdir(self.path / "unfinished")

    @property
    def unfinished_run(self) -> epath.Path:
        """File in the folder `unfinished` that identifies its run."""
        return self.path / "run.json"

    def glue_server(self, model: "Workdir") -> epath.Path:
        """Returns the folder of a GLUE submission, from the models of one seed."""
        return self.path / "glue_server" / model.path.name

    def model(self, task: str, setting: str, seed: int) -> "Workdir":
        """Returns the folder of a fine-tuned model.

        Args:
          setting: "" if there is only one.
        """
        return Workdir(self.path / task / setting / f"seed-{seed}")

    def models(self) -> list[epath.Path]:
        """Returns the folders of all fine-tuned models."""
        patterns = ("*/seed-*/checkpoints", "*/*/seed-*/checkpoints", "seed-*/checkpoints")
        return sorted(place.parent for p in patterns for place in self.path.glob(p))

    @property
    def predictions(self) -> epath.Path:
        return self.path / "predictions"

    @property
    def vocabulary(self) -> epath.Path:
        """Folder with a copy of each vocabulary file, which `interop` reads."""
        return self.path / "vocabulary"

    @property
    def _fingerprints(self) -> epath.Path:
        return self.vocabulary / "fingerprints.json"

    def keep_vocabularies(
        self, paths: Mapping[str, epath.Path], fingerprints: Mapping[str, str]
    ) -> None:
        """Replaces the content of `vocabulary` by copies of files, and stores their fingerprints.

        Args:
          paths: subfolder of `vocabulary` ("" for the folder itself) -> file.

        Raises:
          WorkdirError: the folder cannot be written.
        """
        with self._writable():
            # Read first, because the files may be in the folder that is removed.
            contents = {name: path.read_bytes() for name, path in paths.items()}
            storage.remove_tree(self.vocabulary)
            for name, path in paths.items():
                folder = self.vocabulary / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / path.name).write_bytes(contents[name])
            storage.write_json(self._fingerprints, dict(fingerprints))

    def read_fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of `keep_vocabularies`, or an empty dict without vocabularies.

        Raises:
          DamagedFileError: the file is damaged.
        """
        if not self._fingerprints.is_file():
            return {}
        remedy = "restore it from a copy of the run"
        return storage.read_json(self._fingerprints, remedy=remedy, fields={})

    # State of the folder

    def holds_run(self) -> bool:
        """Returns whether the folder has a config and a folder of checkpoints."""
        return self.checkpoints.is_dir() and self.config.is_file()

    def steps(self) -> list[int]:
        """Returns the steps of the complete checkpoints, in order."""
        return list_steps(self.checkpoints)

    def choose_step(self, step: int | None) -> int | None:
        """Returns `step` if its checkpoint exists, or None (the newest) if any checkpoint exists.

        Raises:
          WorkdirError: the checkpoint does not exist.
        """
        steps = self.steps()
        if steps and step is None:
            return None
        if step in steps:
            return steps[steps.index(step)]  # converts other number types to int
        there = f"; available steps: {', '.join(map(str, steps))}" if steps else "; train it first"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step!r}"
        raise WorkdirError(f"{self} has {what}{there}.", path=self.path, value=step)

    def is_bound(self) -> bool:
        """Returns whether the run has results, so that only `Changeable` fields may change."""
        if self.steps():
            return True
        under_way = self.unfinished.checkpoints
        if under_way.is_dir() and any(under_way.iterdir()):
            return True
        return self.results.is_file() and bool(self.results.read_bytes())

    def read_config(self) -> Config:
        """Reads the stored config of the run.

        Raises:
          WorkdirError: the folder holds no run.
          DamagedFileError: the config is damaged, or has fields unknown to this version.
          PluginError: its mixer is not permitted or cannot be created.
        """
        remedy = f"restore a copy, or use the version of convbert_jax that wrote it; {_CHANGE}"
        try:
            return _read_config(self.config, remedy)
        except (FileNotFoundError, NotADirectoryError):
            raise WorkdirError(
                f"holds no run ({self.config.name}: no such file); train one, or set "
                "another folder.",
                field="--workdir",
                value=str(self),
            ) from None

    def read_config_at(self, step: int | None) -> Config:
        """Reads the config, with the values of the phase that trained a checkpoint.

        Args:
          step: step of the checkpoint; None: the newest.
        """
        config = self.read_config()
        return config.at(step or max(self.steps(), default=0)) if config.phases else config

    @contextlib.contextmanager
    def open(self, config: Config, *, writer: bool = True, alone: bool = True) -> Iterator[None]:
        """Context that locks the folder for this run and stores the config.

        Args:
          writer: False on all processes except process 0, which writes for all.
          alone: whether this is the only process of the run.

        Raises:
          WorkdirError: the folder is not writable, is in use, or holds another model or corpus.
          OwnershipError: the folder is in a bucket and in use.
          UserError: a symbolic link leads out of the folder.
        """
        if not writer:
            yield
            return
        with contextlib.ExitStack() as stack:
            with self._writable():
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock(stack)
            storage.check_links(self.path)
            storage.remove_temporary(self.path, older_than=_ABANDONED)
            self.keep_config(config)
            if storage.is_remote(self.path):
                self._owner = BucketLock(self.path / ".lock", alone=alone)
                with self._writable():  # last: a start that fails above must not replace the owner
                    stack.enter_context(self._owner.holding())
            try:
                yield
            finally:
                self._owner = None

    def check_owner(self) -> None:
        """Raises OwnershipError if the folder is in a bucket and another run has taken it over."""
        if self._owner:
            self._owner.check()

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ImportError) as error:
            # The library for a bucket is missing, or access is denied.
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise WorkdirError(
                f"cannot be written ({reason}); choose a writable folder.",
                field="--workdir",
                value=str(self),
            ) from error

    def _lock(self, stack: contextlib.ExitStack) -> None:
        place = self.path / ".lock"
        if storage.is_remote(place):
            wait_for_owner(place)
            return
        lock = open(  # noqa: SIM115
            place, "a+", encoding="utf-8", errors="replace", opener=storage.no_follow
        )
        stack.enter_context(lock)
        lock.seek(0)
        if not storage.try_lock(lock, f"Cannot lock {place}; use it for one run at a time."):
            owner = lock.read(200).strip() or "another process"
            raise WorkdirError(
                f"is in use by {owner}; wait for it, stop it, or choose another --workdir.",
                field="--workdir",
                value=str(self),
            )
        lock.truncate(0)
        lock.write(this_process())
        lock.flush()

    def keep_config(self, config: Config) -> None:
        """Stores the config.

        Raises:
          WorkdirError: the run has results, and a field changed that is not `Changeable`.
          DamagedFileError: the stored config is damaged.
        """
        new = decided_by_run(to_dict(config))
        remedy = f"restore a copy, or remove it to continue with the current config; {_CHANGE}"
        try:
            old = to_dict(_read_config(self.config, remedy, check=False))
            changed = changes.differences(old, new)
        except FileNotFoundError:
            changed = {}
        if self.is_bound():
            refused = {
                field: pair
                for field, pair in changed.items()
                if not changes.is_changeable(Config, field, config.recipe)
            }
            if refused:
                raise WorkdirError(
                    f"--workdir={self} holds a run with another config: "
                    f"{changes.describe(refused)}; choose another "
                    f"--workdir{self._with_its_shards(config, refused)}, or restore these values.",
                    field=f"config.{next(iter(refused))}",
                    path=self.path,
                )
        if changed := {f: pair for f, pair in changed.items() if "auto" not in pair}:
            logging.info("Config changed since the last start: %s.", changes.describe(changed))
        storage.write_json(self.config, storage.seal(new))

    def _with_its_shards(self, config: Config, refused) -> str:
        """Returns the flag to reuse the shards of this folder in another one, if they are valid."""
        touched = any(field.startswith(("data.", "tokenizer.", "recipe")) for field in refused)
        if touched or config.data.directory or not (self._shards / "metadata.json").is_file():
            return ""
        return f" with --config.data.directory={self._shards}, which reuses the existing shards"


def list_steps(checkpoints: epath.Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in order."""
    if not checkpoints.is_dir():
        return []
    found = (path for path in checkpoints.iterdir() if path.name.isdecimal())
    if storage.is_remote(checkpoints):
        found = (path for path in found if (path / _COMMITTED).exists())
    return sorted(int(path.name) for path in found)


def unfinished_steps(checkpoints: epath.Path) -> list[int]:
    """Returns the steps of incomplete checkpoints in a bucket, in order; none for local folders."""
    if not storage.is_remote(checkpoints) or not checkpoints.is_dir():
        return []
    begun = {int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()}
    return sorted(begun.difference(list_steps(checkpoints)))


def _read_config(file: epath.Path, remedy: str, *, check: bool = True) -> Config:
    """Reads the config in a file; fields newer than the file get their defaults.

    Args:
      check: False accepts invalid combinations, which an older version may have allowed.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: it is not a config.
      PluginError: its mixer is not permitted or cannot be created.
    """
    values = decided_by_run(storage.read_json(file, remedy=remedy, fields={}))
    try:
        return from_config_dict(values, check=check)
    except PluginError as error:
        raise PluginError(f"{file}: {error}", path=file) from error
    except ConfigError as error:
        raise storage.damaged(file, str(error).rstrip("."), remedy) from None
