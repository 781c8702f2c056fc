"""Command line and jobs that benchmarks/on_gpu.py and benchmarks/on_tpu.py share.

Each job is a process with a time limit. Results are appended to FOLDER/results.jsonl at once. A
second call skips finished jobs and continues the pre-training. FOLDER/archives has the results and
the pre-trained weights in at most 8 files of 15 MB. `cat large.tar.gz.* | tar xz` unpacks the
weights as run folders without optimizer state.
"""

import argparse
import dataclasses
import importlib
import os
import pathlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.on_device import schedule
from benchmarks.on_device.schedule import Job, Results

# First word of a job -> (module, function of (results, job, rehearse)).
CHILDREN = {
    "environment": ("environment", "describe"),
    "kernels": ("environment", "check_kernels"),
    "step": ("steps", "measure"),
    "pytorch": ("pytorch", "measure"),
    "compiled": ("pytorch", "measure"),
    "layers": ("tpu", "measure_layers"),
    "resume": ("tpu", "check_resume"),
}
UNOPTIMIZED = "--xla_backend_optimization_level=0"  # a rehearsal mostly compiles
PACKING = 20.0  # seconds


@dataclasses.dataclass(frozen=True)
class Session:
    """Makes the jobs of one call.

    Attributes:
      folder: absolute path of the results.
      rehearse: whether jobs run on the CPU in tiny shapes.
      environment: variables of the jobs.
    """

    folder: pathlib.Path
    rehearse: bool
    environment: Mapping[str, str]

    @property
    def on_cpu(self) -> Mapping[str, str]:
        """Variables of jobs that leave the device to others."""
        return {**self.environment, "JAX_PLATFORMS": "cpu"}

    def child(self, name: str, seconds: float, environment=None, **more: Any) -> Job:
        """Makes a job of CHILDREN; `more` are fields of `Job`."""
        command = [sys.executable, "-m", __spec__.name, name, f"--folder={self.folder}"]
        command += ["--rehearse"] * self.rehearse
        return Job(name, command, seconds, environment=environment or self.environment, **more)


def make_session(
    options: argparse.Namespace, platform: str, flags: str = "", **environment: str
) -> Session:
    """Makes a session from the command line.

    Args:
      platform: value of JAX_PLATFORMS, except in a rehearsal.
      flags: XLA flags of all jobs, except in a rehearsal.
      environment: further variables of all jobs.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMIZED if options.rehearse else flags}"
    shared = {
        "JAX_PLATFORMS": "cpu" if options.rehearse else platform,
        "JAX_COMPILATION_CACHE_DIR": str(options.folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": flags.strip(),
    }
    return Session(options.folder, options.rehearse, shared | environment)


def main_command(config: str, fields: Mapping[str, Any], *flags: str) -> list[str]:
    """Returns a command of convbert_jax.main; `fields` are "model.layers" -> value."""
    command = [sys.executable, "-m", "convbert_jax.main", f"--config={config}", *flags]
    return command + [f"--config.{name}={value}" for name, value in fields.items()]


def run(
    parser: argparse.ArgumentParser,
    list_jobs: Callable[[argparse.Namespace], Sequence[Job]],
    *,
    runs: Sequence[str] = (),
    report: Callable[[Results], None] = lambda _: None,
) -> None:
    """Parses the command line, runs the jobs and packs the results.

    Args:
      parser: has "minutes" and "folder"; "rehearse" is added.
      runs: folders of pre-training runs, whose weights are packed.
      report: writes a summary of all results; called after the last job.
    """
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    end = time.monotonic() + 60 * options.minutes - PACKING
    options.folder.mkdir(parents=True, exist_ok=True)
    results = Results(options.folder)
    schedule.run(
        list_jobs(options), results, end, after_each=lambda: schedule.pack(results.folder, [])
    )
    report(results)
    weights = [path for name in runs for path in list_weights(results.folder / name)]
    for path in schedule.pack(results.folder, weights):
        print(path, path.stat().st_size)


def list_weights(run: pathlib.Path) -> list[pathlib.Path]:
    """Returns the parts of a run folder for fine-tuning: no shards and no optimizer state."""
    steps = [path for path in run.glob("checkpoints/*") if path.name.isdigit()]
    if not steps:
        return []
    newest = max(steps, key=lambda path: int(path.name))
    left_out = ("checkpoints", "data", "huggingface")
    found = [path for path in run.iterdir() if path.name not in left_out]
    return found + [path for path in newest.iterdir() if path.name != "opt_state"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs one job of on_gpu or on_tpu.")
    parser.add_argument("job", help='for example "step small"')
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="results folder")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    module, function = CHILDREN[options.job.split()[0]]
    run_job = getattr(importlib.import_module(f"benchmarks.on_device.{module}"), function)
    run_job(Results(options.folder), options.job, options.rehearse)


if __name__ == "__main__":
    main()
