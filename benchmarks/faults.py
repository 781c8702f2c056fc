"""Random kills of multi-process runs, and a run whose number of devices changes.

    python -m benchmarks.faults kills --processes 2 --kills 50 --folder runs/faults
    python -m benchmarks.faults kills --during save --kills 4 --folder runs/faults
    python -m benchmarks.faults elastic --folder runs/elastic
    python -m benchmarks.faults overhead --folder runs/overhead

kills: small runs on this machine's CPUs, set up like N hosts (gloo), are killed at random moments
and restarted until they finish: SIGKILL or SIGTERM, to one process or to all. Each finished run is
compared bitwise with an uninterrupted one: parameters, moments, data position and the metrics of
every logged step, so lost or repeated rows are detected. Each kill prints a JSON line (`Kill`).
With --during all kills happen in a save, in an evaluation or in the consistency check at startup
(roll-call).

elastic: one run that resumes on 8, 2 and 4 devices of one process and then as 1, 2 and 4 processes.
Prints its losses and those of the same steps on one device.

overhead: the time that twelve checkpoints and 24 log lines add between the first and the last step
of configs/tiny.py. Runs with and without them alternate.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np

from convbert_jax.analysis import verify_resume
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.workdir import list_steps

EVAL_EVERY = 30
MODEL = (
    *("--config=configs/tiny.py", "--config.platform=cpu", "--config.optimizer.method=adamw"),
    *("--config.model.layers=1", "--config.model.hidden_size=64", "--config.model.heads=2"),
    *("--config.model.embedding_size=32", "--config.model.ffn_size=128", "--config.data.length=32"),
    *("--config.tokenizer.vocab_size=1024", "--config.tokenizer.train_megabytes=1"),
    *(
        "--config.train.batch_size=8",
        "--config.train.log_every=5",
        f"--config.train.eval_every={EVAL_EVERY}",
    ),
    *("--config.train.eval_rows=16", "--config.checkpoint.every=15"),
    # A constant rate, so that the schedule does not depend on the number of steps.
    *("--config.optimizer.warmup_steps=20", "--config.optimizer.schedule=constant"),
)
# Seconds before a process counts as hung; waiting for a missing process takes 300.
PATIENCE = 400
# --during: approximate seconds that each takes.
DURING = {"save": 0.1, "evaluation": 0.1, "roll-call": 2.0}


@dataclasses.dataclass
class Kill:
    """One kill; with --json an object with these keys.

    Attributes:
      processes: number of processes.
      signal: signal that was sent.
      to: index of the process that received it, or "all".
      after: seconds after the start of the processes.
      during: last line logged by process 0; with --during save the folder being written.
      ended: seconds until all processes had ended.
      codes: exit codes of the processes.
      back: seconds from the restart to the first new logged step; None if killed before it.
    """

    processes: int
    signal: str
    to: str
    after: float
    during: str
    ended: float
    codes: list[int]
    back: float | None = None


class Cluster:
    """Starts `count` processes of one run with separate logs."""

    def __init__(self, folder: pathlib.Path, count: int, arguments: Sequence[str], devices=1):
        self.logs = [folder / f"process-{index}.log" for index in range(count)]
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        together = []
        if count > 1:
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            environment["JAX_CPU_COLLECTIVES_IMPLEMENTATION"] = "gloo"
            together = [f"--coordinator=localhost:{port}", f"--processes={count}"]
        self.started = time.monotonic()
        self.processes = []
        for index, log in enumerate(self.logs):
            which = [f"--process={index}"] if together else []
            with log.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "convbert_jax.main", *arguments, *together, *which],
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )

    def send(self, number: int, to: Sequence[int]) -> None:
        for index in to:
            if self.processes[index].poll() is None:
                self.processes[index].send_signal(number)

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def wait(self) -> list[int]:
        """Returns the exit codes; raises SystemExit if a process does not end."""
        limit = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > limit:
                self.send(signal.SIGKILL, range(len(self.processes)))
                sys.exit(f"error: a process did not end in {PATIENCE} s; see {self.logs[0]}.")
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def lines(self) -> list[str]:
        """Returns log lines of process 0 without timestamps."""
        return [line[9:80] for line in self.logs[0].read_text(errors="replace").splitlines()]

    def last_line(self) -> str:
        return (self.lines() or ["nothing logged yet"])[-1]


class Moment:
    """A random time to kill; polled."""

    def __init__(self, cluster: Cluster, whole: float, draw: random.Random):
        # In a quarter of starts it is later than the end, so that runs finish.
        self._moment = cluster.started + draw.uniform(0, whole * 4 / 3)
        self._cluster = cluster

    def come(self) -> str:
        """Returns a description of the current activity once the time has come, else ""."""
        return self._cluster.last_line() if time.monotonic() >= self._moment else ""


class MomentDuring:
    """A random time after the first or second start of a --during activity.

    If there is no second one, as for roll-call, the run finishes.
    """

    def __init__(self, cluster: Cluster, workdir: pathlib.Path, what: str, draw: random.Random):
        self._cluster, self._workdir, self._what = cluster, workdir, what
        self._pass, self._delay = draw.randrange(2), draw.uniform(0, DURING[what])
        self._began: float | None = None

    def come(self) -> str:
        seen, now = self._going_on(), time.monotonic()
        if not seen:
            self._pass -= self._began is not None
            self._began = None
        elif self._began is None:
            self._began = now
        is_due = seen and self._pass <= 0 and now - self._began >= self._delay
        return seen if is_due else ""

    def _going_on(self) -> str:
        lines = self._cluster.lines()
        if self._what == "save":  # leftovers of the previous start disappear at the first step
            unfinished = (self._workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*")
            began = any("First step" in line for line in lines)
            return next((path.name for path in unfinished), "") if began else ""
        if self._what == "evaluation":
            found = re.match(r"step (\d+)/", lines[-1]) if lines else None
            return lines[-1] if found and int(found[1]) % EVAL_EVERY == 0 else ""
        connected = any(line.startswith("Process 0 of") for line in lines)
        agreed = any("same config, same data" in line for line in lines)
        return lines[-1] if connected and not agreed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("kills", "elastic", "overhead"))
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--during", choices=DURING, help="kill then instead of at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of kill times")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of overhead")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare(options.folder)
    {"kills": kill_at_random, "elastic": change_devices, "overhead": compare_overhead}[
        options.what
    ](options)


def run_arguments(folder: pathlib.Path, name: str, steps: int) -> list[str]:
    shared = [f"--workdir={folder / name}", f"--config.train.steps={steps}"]
    cache = f"--config.train.compile_cache={folder / 'cache'}"
    return [*MODEL, *shared, f"--config.data.directory={folder / 'data'}", cache]


def prepare(folder: pathlib.Path) -> None:
    arguments = [*run_arguments(folder, "prepared", 120), "--mode=prepare"]
    (code,) = Cluster(folder / "logs" / "prepare", 1, arguments).wait()
    if code:
        sys.exit(f"error: preparing failed; see {folder}/logs/prepare.")


def finish(folder: pathlib.Path, name: str, count: int, steps: int, devices: int = 1) -> Cluster:
    cluster = Cluster(
        folder / "logs" / name, count, run_arguments(folder, name, steps), devices=devices
    )
    codes = cluster.wait()
    if any(codes) or list_steps(folder / name / "checkpoints")[-1] != steps:
        sys.exit(f"error: {name} ended with {codes}; see {cluster.logs[0]}.")
    return cluster


def kill_at_random(options: argparse.Namespace) -> None:
    folder, count, steps = options.folder, options.processes, options.steps
    draw = random.Random(options.seed)
    straight = f"straight-{count}"
    if not (folder / straight / "checkpoints" / str(steps)).exists():
        finish(folder, straight, count, steps)
    # Programs are cached, as in runs after a kill.
    warm = finish(folder, f"warm-{count}-{os.getpid()}", count, steps)
    whole = time.monotonic() - warm.started
    kills: list[Kill] = []
    runs = differing = 0
    while len(kills) < options.kills:
        name = f"killed-{options.during or 'anywhere'}-{count}-{options.seed}-{runs}"
        for kill in _disturb(options, name, whole, draw):
            kills.append(kill)
            print(json.dumps(dataclasses.asdict(kill)), flush=True)
        runs += 1
        different = compare_runs(folder / straight, folder / name, steps)
        differing += bool(different)
        said = f"differs in {len(different)}: {different[:3]}" if different else "is equal"
        print(f"run {runs}, {len(kills)} kills so far: {said} (bitwise)", flush=True)
    ended, back = [k.ended for k in kills], [k.back for k in kills if k.back is not None]
    print(f"{count} processes, {len(kills)} kills in {runs} runs, {differing} runs differ")
    for what, values in (("until all had ended", ended), ("from start to next step", back)):
        print(f"{what}: median {statistics.median(values):.1f} s, largest {max(values):.1f} s")


def _disturb(
    options: argparse.Namespace, name: str, whole: float, draw: random.Random
) -> Iterator[Kill]:
    """Restarts the run until it finishes, with about four kills."""
    folder, count, steps = options.folder, options.processes, options.steps
    arguments, logs = run_arguments(folder, name, steps), folder / "logs" / name
    kill: Kill | None = None
    for attempt in range(1_000):
        reached = logged_step(folder / name)
        cluster = Cluster(logs / str(attempt), count, arguments)
        if options.during:
            moment = MomentDuring(cluster, folder / name, options.during, draw)
        else:
            moment = Moment(cluster, whole, draw)
        number = draw.choice((signal.SIGKILL, signal.SIGTERM))
        to = draw.choice([[index] for index in range(count)] + [list(range(count))] * count)
        while not (during := moment.come()) and cluster.running():
            if kill and kill.back is None and logged_step(folder / name) > reached:
                kill.back = time.monotonic() - cluster.started
            time.sleep(0.01)
        if kill:
            yield kill
        if not cluster.running():
            if any(codes := cluster.wait()):
                sys.exit(f"error: {name} failed unexpectedly with {codes}; see {cluster.logs[0]}.")
            return
        sent = time.monotonic()
        cluster.send(number, to)
        codes = cluster.wait()
        kill = Kill(
            processes=count,
            signal=number.name,
            to="all" if len(to) > 1 else str(to[0]),
            after=round(sent - cluster.started, 2),
            during=during,
            ended=round(time.monotonic() - sent, 2),
            codes=codes,
        )


def logged_step(workdir: pathlib.Path) -> int:
    """Returns the last step in metrics.jsonl; 0 before the first."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def compare_runs(first: pathlib.Path, second: pathlib.Path, steps: int) -> list[str]:
    """Returns bitwise differences in the last checkpoint's arrays and the logged metrics."""
    different = verify_resume.compare(
        *(load_arrays(workdir / "checkpoints", steps)[1] for workdir in (first, second))
    )
    for key, numbers in read_metrics(first).items():
        if numbers != read_metrics(second).get(key):
            different.append(f"{key[0]} of step {key[1]}")
    return different


def read_metrics(workdir: pathlib.Path) -> dict[tuple[str, int], dict[str, float]]:
    """Returns (split, step) -> metrics without timings."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").open()]
    clocks = ("second", "memory", "time", "mfu")
    return {
        (line["split"], line["step"]): {
            name: value
            for name, value in line.items()
            if not any(clock in name for clock in clocks)
        }
        for line in lines
    }


def change_devices(options: argparse.Namespace) -> None:
    folder, part = options.folder, options.steps // 6
    finish(folder, "alone", 1, part * 6)
    ways = [(1, 8), (1, 2), (1, 4), (1, 1), (2, 1), (4, 1)]
    for index, (count, devices) in enumerate(ways):
        finish(folder, "changed", count, part * (index + 1), devices)
    alone, changed = read_metrics(folder / "alone"), read_metrics(folder / "changed")
    print("steps, processes x devices: loss of the changed run, loss of the constant run")
    for (split, step), numbers in sorted(alone.items(), key=lambda item: item[0][1]):
        if split == "train" and step % part == 0:
            count, devices = ways[step // part - 1]
            other = changed[split, step]["loss"]
            print(f"{step}, {count} x {devices}: {other:.6f}, {numbers['loss']:.6f}")
    pairs = [(alone[key]["loss"], changed[key]["loss"]) for key in alone if key in changed]
    largest = max(abs(one - other) / one for one, other in pairs)
    print(f"largest relative difference of {len(pairs)} losses: {largest:.1e}")
    a, b = (load_arrays(folder / w / "checkpoints", part * 6)[1] for w in ("alone", "changed"))
    data = "the same" if a["data"].tobytes() == b["data"].tobytes() else "ANOTHER"
    moved = max(float(np.max(np.abs(a[name] - b[name]))) for name in a if name.startswith("params"))
    print(f"parameters at the end differ by at most {moved:.1e}; position in the data: {data}")


def compare_overhead(options: argparse.Namespace) -> None:
    """Measures unmodified configs/tiny.py between its first and last step."""
    steps = options.steps
    kinds = {
        "checkpoints": (f"--config.checkpoint.every={steps // 12}", f"log_every={steps}"),
        "lines": (f"--config.checkpoint.every={steps}", f"log_every={steps // 24}"),
        "neither": (f"--config.checkpoint.every={steps}", f"log_every={steps}"),
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(options.rounds):
        for kind, (checkpoints, lines) in kinds.items():
            name = f"{kind}-{turn}-{os.getpid()}"
            arguments = [
                *("--config=configs/tiny.py", "--config.train.eval_every=100000"),
                *run_arguments(options.folder, name, steps)[len(MODEL) :],
                *(f"--config.data.directory={options.folder / 'data-tiny'}", checkpoints),
                f"--config.train.{lines}",
            ]
            cluster = Cluster(options.folder / "logs" / name, 1, arguments)
            began = _wait_for(cluster, "First step")
            seconds[kind].append(_wait_for(cluster, f"step {steps}/") - began)
            if any(cluster.wait()):
                sys.exit(f"error: {name} failed; see {cluster.logs[0]}.")
    for kind, values in seconds.items():
        pairs = [a / b for a, b in zip(values, seconds["neither"], strict=True)]
        print(
            f"{kind}: {', '.join(f'{value:.2f}' for value in values)} s; relative to neither "
            f"{statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})"
        )


def _wait_for(cluster: Cluster, said: str) -> float:
    """Returns the time at which process 0 logs the line."""
    while cluster.running():
        if said in cluster.logs[0].read_text(errors="replace"):
            break
        time.sleep(0.01)
    return time.monotonic()


if __name__ == "__main__":
    main()
