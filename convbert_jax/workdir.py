"""The folder of one run: one process group at a time, one model and one corpus for good.

WORKDIR/config.json     the resolved config of the last start
WORKDIR/.lock           held while a run is alive; in a bucket, see `ownership.py`
WORKDIR/data            tokenizer and shards, unless config.data.directory names another folder
WORKDIR/checkpoints     Orbax
WORKDIR/vocabulary      copies of the vocabularies, with which the folder may be moved anywhere
WORKDIR/metrics.jsonl   one line per log interval and evaluation; TensorBoard files beside it
WORKDIR/curves.png      a picture of them; evaluation/, huggingface/, inside/, profile/ if asked for
WORKDIR/report.html     what the run came to, of any recipe, for a browser

Of fine-tuning:

WORKDIR/results.jsonl   one line for each finished run; table.md of all, glue_server/seed-N
WORKDIR/unfinished      the run that is under way
WORKDIR/TASK/seed-N     a model: a run's folder of its own, with predictions/

The first checkpoint or result binds a folder to its config; until then every field may change.
Shards are kept from being mixed by their own record, see `data/corpus/corpus.py`.

A folder may lie in a bucket (gs://BUCKET/RUN); tokenizer and shards are read from a local disk.
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

# Written last into a checkpoint in a bucket, which cannot rename: without it, it is not whole.
_COMMITTED = "commit_success.txt"
_CHANGE = "change fields on the command line, as --config.train.steps=1000"
_ABANDONED = 3600.0  # seconds: --mode=eval and export write here without the lock


class WorkdirError(UserError):
    """The folder cannot be used for this run."""


class Workdir:
    """Where everything of one run is; nothing is read or written before a method says so."""

    def __init__(self, path: epath.PathLike):
        self.path = files.to_path(path)
        self._owner: ownership.Owner | None = None  # of one in a bucket that is open for writing

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
        """Which weights taught the run; without a teacher it is not there."""
        return self.path / "teacher.json"

    @property
    def metrics(self) -> epath.Path:
        return self.path / "metrics.jsonl"

    @property
    def curves(self) -> epath.Path:
        return self.path / "curves.png"

    @property
    def report(self) -> epath.Path:
        """A page on what the run came to, written at its end and where it is interrupted."""
        return self.path / "report.html"

    @property
    def profile(self) -> epath.Path:
        return self.path / "profile"

    def data(self, config: Config) -> epath.Path:
        """Tokenizer and shards; in a bucket too, see `data/units/bucket.py`."""
        named = config.data.directory
        return files.to_path(named) if named else self._shards

    @property
    def _shards(self) -> epath.Path:
        return self.path / "data"

    def evaluation(self, step: int) -> epath.Path:
        """The held-out numbers of a checkpoint."""
        return self.path / "evaluation" / f"step-{step}.json"

    def inside(self, step: int) -> epath.Path:
        """Pictures and numbers of what the layers of a checkpoint do."""
        return self.path / "inside" / f"step-{step}"

    def export(self, form: str, step: int) -> epath.Path:
        """A checkpoint for other software; `form` as "huggingface"."""
        return self.path / form / f"step-{step}"

    def trial(self, name: str) -> "Workdir":
        """A run that is made to verify this one."""
        return Workdir(self.path / "verify_resume" / name)

    def bad_batch(self, step: int, process: int) -> epath.Path:
        """The batch of a step whose numbers were not finite."""
        return self.path / f"bad_batch_step_{step}_process_{process}.npz"

    @property
    def tracker(self) -> epath.Path:
        """How a tracker of experiments calls this run."""
        return self.path / "tracker.json"

    @property
    def skipped(self) -> epath.Path:
        """Batches that a run passes over after it went back."""
        return self.path / "skipped_batches.json"

    # Of fine-tuning

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
        """In the folder `unfinished`: which run it is of."""
        return self.path / "run.json"

    def glue_server(self, model: "Workdir") -> epath.Path:
        """The files of a submission, from models of one seed."""
        return self.path / "glue_server" / model.path.name

    def model(self, task: str, setting: str, seed: int) -> "Workdir":
        """One fine-tuned model.

        Args:
          setting: "" where there is one only.
        """
        return Workdir(self.path / task / setting / f"seed-{seed}")

    def models(self) -> list[epath.Path]:
        """The fine-tuned models in here."""
        patterns = ("*/seed-*/checkpoints", "*/*/seed-*/checkpoints", "seed-*/checkpoints")
        return sorted(place.parent for p in patterns for place in self.path.glob(p))

    @property
    def predictions(self) -> epath.Path:
        return self.path / "predictions"

    @property
    def vocabulary(self) -> epath.Path:
        """Folder with a copy of each vocabulary's file; what reads it is `interop`."""
        return self.path / "vocabulary"

    @property
    def _fingerprints(self) -> epath.Path:
        return self.vocabulary / "fingerprints.json"

    def keep_vocabularies(
        self, paths: Mapping[str, epath.Path], fingerprints: Mapping[str, str]
    ) -> None:
        """Makes `vocabulary` copies of these files alone, and notes what they are known by.

        Args:
          paths: folder in `vocabulary`, "" for itself -> file.

        Raises:
          WorkdirError: it cannot be written.
        """
        with self._writable():
            contents = {name: path.read_bytes() for name, path in paths.items()}  # maybe in here
            files.remove_tree(self.vocabulary)
            for name, path in paths.items():
                folder = self.vocabulary / name
                folder.mkdir(parents=True, exist_ok=True)
                (folder / path.name).write_bytes(contents[name])
            files.write_json(self._fingerprints, dict(fingerprints))

    def read_fingerprints(self) -> dict[str, str]:
        """Of `keep_vocabularies`, if it was called; DamagedFileError: it is not what it wrote."""
        if not self._fingerprints.is_file():
            return {}
        remedy = "put it back from a copy of the run"
        return files.read_json(self._fingerprints, remedy=remedy, fields={})

    # What is there

    def holds_run(self) -> bool:
        """Whether there are a config and a folder of checkpoints."""
        return self.checkpoints.is_dir() and self.config.is_file()

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return list_steps(self.checkpoints)

    def choose_step(self, step: int | None) -> int | None:
        """`step` if there is a checkpoint of it; None, for the newest that is whole, if any is.

        Raises:
          WorkdirError: there is none.
        """
        steps = self.steps()
        if steps and step is None:
            return None
        if step in steps:
            return steps[steps.index(step)]  # an int, whatever kind of number was given
        there = f"; steps there: {', '.join(map(str, steps))}" if steps else "; train it first"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step!r}"
        raise WorkdirError(f"{self} has {what}{there}.", path=self.path, value=step)

    def is_bound(self) -> bool:
        """Whether the run has come so far that only what is changeable may change."""
        if self.steps():
            return True
        under_way = self.unfinished.checkpoints
        if under_way.is_dir() and any(under_way.iterdir()):
            return True
        return self.results.is_file() and bool(self.results.read_bytes())

    def read_config(self) -> Config:
        """The config that the run keeps.

        Raises:
          WorkdirError: there is no run.
          DamagedFileError: its config is damaged, or has fields that this version does not know.
          PluginError: the user did not name its mixer, or it cannot be made here.
        """
        remedy = f"restore a copy, or use the version of convbert_jax that wrote it; {_CHANGE}"
        try:
            return _read(self.config, remedy)
        except (FileNotFoundError, NotADirectoryError):
            raise WorkdirError(
                f"holds no run ({self.config.name}: no such file); train one, or name "
                "another folder.",
                field="--workdir",
                value=str(self),
            ) from None

    @contextlib.contextmanager
    def open(self, config: Config, *, writer: bool = True, alone: bool = True) -> Iterator[None]:
        """Locks the folder for this run and keeps its config; releases it at the end.

        Args:
          writer: False on all processes but the first, which does the writing for them.
          alone: whether this is the only process of the run.

        Raises:
          WorkdirError: the folder is not writable, is in use, or holds another model or corpus.
          OwnershipError: it is in a bucket and in use.
          UserError: a symbolic link leads out of it.
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
                with self._writable():  # not before: a start that is refused leaves the owner
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
            # a library that talks to a bucket is absent or refused
            reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
            raise WorkdirError(
                f"cannot be written ({reason}); choose a folder that can.",
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
        if not files.try_lock(lock, f"{place} cannot be locked; let one run at a time use it."):
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
        """Writes the config, unless it changes what a run that has begun may not change."""
        new = decided_by_run(to_dict(config))
        remedy = f"restore a copy, or remove it to go on with the config named now; {_CHANGE}"
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
                    f"--workdir{self._with_its_shards(config, refused)}, or set these fields back.",
                    field=f"config.{next(iter(refused))}",
                    path=self.path,
                )
        if changed := {f: pair for f, pair in changed.items() if "auto" not in pair}:
            logging.info("Config changed since the last start: %s.", changes.describe(changed))
        files.write_json(self.config, files.seal(new))

    def _with_its_shards(self, config: Config, refused) -> str:
        """How the start in another folder gets the shards of this one, where they may serve it."""
        touched = any(field.startswith(("data.", "tokenizer.", "recipe")) for field in refused)
        if touched or config.data.directory or not (self._shards / "metadata.json").is_file():
            return ""
        return f" with --config.data.directory={self._shards}, which uses the shards that are here"


def list_steps(checkpoints: epath.Path) -> list[int]:
    """Steps of the complete checkpoints in a folder of them, in order."""
    if not checkpoints.is_dir():
        return []
    found = (path for path in checkpoints.iterdir() if path.name.isdecimal())
    if files.is_remote(checkpoints):
        found = (path for path in found if (path / _COMMITTED).exists())
    return sorted(int(path.name) for path in found)


def unfinished_steps(checkpoints: epath.Path) -> list[int]:
    """Of a bucket: steps whose checkpoints were begun and never ended, in order."""
    if not files.is_remote(checkpoints) or not checkpoints.is_dir():
        return []
    begun = {int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()}
    return sorted(begun.difference(list_steps(checkpoints)))


def _read(file: epath.Path, remedy: str, *, check: bool = True) -> Config:
    """The config in a file, where a younger field has its default.

    Args:
      check: False takes one that cannot run, as the rules of an older version may have let it.

    Raises:
      FileNotFoundError: it is not there.
      DamagedFileError: it is no config.
      PluginError: the user did not name its mixer, or it cannot be made here.
    """
    values = decided_by_run(files.read_json(file, remedy=remedy, fields={}))
    try:
        return from_config_dict(values, check=check)
    except PluginError as error:
        raise PluginError(f"{file}: {error}", path=file) from error
    except ConfigError as error:
        raise files.damaged(file, str(error).rstrip("."), remedy) from None
