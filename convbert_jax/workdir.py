"""The folder of a run, used by one process group at a time, for one model and one corpus.

WORKDIR/config.json     resolved config of the last start
WORKDIR/.lock           held while a run is alive; in a bucket, see `ownership.py`
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
from collections.abc import Iterator, Mapping

from absl import logging
from etils import epath

from convbert_jax import files, links, ownership
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
        self.path = files.to_path(path)
        self._owner: ownership.Owner | None = None  # while a folder in a bucket is open for writing

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
        return files.to_path(named) if named else self._shards

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
            files.remove_tree(self.vocabulary)
            for name, path in paths.items():
                folder = self.vocabulary / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / path.name).write_bytes(contents[name])
            files.write_json(self._fingerprints, dict(fingerprints))

    def read_fingerprints(self) -> dict[str, str]:
        """Returns the fingerprints of `keep_vocabularies`, or an empty dict without vocabularies.

        Raises:
          DamagedFileError: the file is damaged.
        """
        if not self._fingerprints.is_file():
            return {}
        remedy = "restore it from a copy of the run"
        return files.read_json(self._fingerprints, remedy=remedy, fields={})

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
            return _read(self.config, remedy)
        except (FileNotFoundError, NotADirectoryError):
            raise WorkdirError(
                f"holds no run ({self.config.name}: no such file); train one, or set "
                "another folder.",
                field="--workdir",
                value=str(self),
            ) from None

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
            links.check(self.path)
            links.remove_temporary(self.path, older_than=_ABANDONED)
            self.keep_config(config)
            if files.is_remote(self.path):
                self._owner = ownership.Owner(self.path / ".lock", alone=alone)
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
        if files.is_remote(place):
            ownership.wait_for_silence(place)
            return
        lock = open(  # noqa: SIM115
            place, "a+", encoding="utf-8", errors="replace", opener=links.no_follow
        )
        stack.enter_context(lock)
        lock.seek(0)
        if not files.try_lock(lock, f"Cannot lock {place}; use it for one run at a time."):
            owner = lock.read(200).strip() or "another process"
            raise WorkdirError(
                f"is in use by {owner}; wait for it, stop it, or choose another --workdir.",
                field="--workdir",
                value=str(self),
            )
        lock.truncate(0)
        lock.write(ownership.this_process())
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
            old = to_dict(_read(self.config, remedy, check=False))
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
        files.write_json(self.config, files.seal(new))

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
    if files.is_remote(checkpoints):
        found = (path for path in found if (path / _COMMITTED).exists())
    return sorted(int(path.name) for path in found)


def unfinished_steps(checkpoints: epath.Path) -> list[int]:
    """Returns the steps of incomplete checkpoints in a bucket, in order; none for local folders."""
    if not files.is_remote(checkpoints) or not checkpoints.is_dir():
        return []
    begun = {int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()}
    return sorted(begun.difference(list_steps(checkpoints)))


def _read(file: epath.Path, remedy: str, *, check: bool = True) -> Config:
    """Reads the config in a file; fields newer than the file get their defaults.

    Args:
      check: False accepts invalid combinations, which an older version may have allowed.

    Raises:
      FileNotFoundError: the file does not exist.
      DamagedFileError: it is not a config.
      PluginError: its mixer is not permitted or cannot be created.
    """
    values = decided_by_run(files.read_json(file, remedy=remedy, fields={}))
    try:
        return from_config_dict(values, check=check)
    except PluginError as error:
        raise PluginError(f"{file}: {error}", path=file) from error
    except ConfigError as error:
        raise files.damaged(file, str(error).rstrip("."), remedy) from None
