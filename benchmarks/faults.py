"""Random kills of runs of several processes, and a run that changes its devices on the way.

    python -m benchmarks.faults kills --processes 2 --kills 50 --folder runs/faults
    python -m benchmarks.faults kills --during save --kills 4 --folder runs/faults
    python -m benchmarks.faults elastic --folder runs/elastic
    python -m benchmarks.faults overhead --folder runs/overhead

kills: small runs on the CPUs of this machine, as N hosts would run them (gloo), are killed at
random moments from their start on and started again until they finish: SIGKILL or SIGTERM, to one
process or to all. Each finished run is compared with one that nobody disturbed, to the bit:
parameters, moments, position in the data, and the numbers of every logged step, so rows that were
lost or read twice would show. A line of JSON for each kill has what was going on, the seconds until
the last process had ended, the exit codes, and the seconds from the next start to the next step.
With --during all kills are in a save, in an evaluation or in the roll-call of a start.

elastic: one run that goes on from its checkpoints on 8, 2 and 4 devices of one process and then as
1, 2 and 4 processes, against the same steps on one device: the losses of both.

overhead: what twelve checkpoints and 24 lines of the log in so many steps of configs/tiny.py add to
the time between its first step and its last, by runs with and without them, in turn.
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
from convbert_jax.training.checkpoints.reading import load_arrays
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
    # A constant rate, so that a run told of its steps bit by bit has that of one told of all.
    *("--config.optimizer.warmup_steps=20", "--config.optimizer.schedule=constant"),
)
# Seconds, for whatever should have ended long ago: waiting for one that never comes takes 300.
PATIENCE = 400
# --during: about as many seconds as it takes.
DURING = {"save": 0.1, "evaluation": 0.1, "roll-call": 2.0}


@dataclasses.dataclass
class Kill:
    """One kill; with --json a line of these keys.

    Attributes:
      signal, to: what was sent to which process, "all" or its number.
      after: seconds after the start of the processes.
      during: the last line that process 0 had logged; with --during save the folder that was being
        written.
      ended: seconds until no process was left.
      codes: of the processes.
      back: seconds from the next start to its first step beyond what had been logged, or None where
        that start was killed before.
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
    """`count` processes of one run; each writes into a log of its own."""

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
        """Exit codes. Raises SystemExit where a process does not end."""
        limit = time.monotonic() + PATIENCE
        while self.running():
            if time.monotonic() > limit:
                self.send(signal.SIGKILL, range(len(self.processes)))
                sys.exit(f"error: a process did not end in {PATIENCE} s; see {self.logs[0]}.")
            time.sleep(0.05)
        return [process.returncode for process in self.processes]

    def lines(self) -> list[str]:
        """Of the log of process 0, without the time."""
        return [line[9:80] for line in self.logs[0].read_text(errors="replace").splitlines()]

    def last_line(self) -> str:
        return (self.lines() or ["nothing logged yet"])[-1]


class Moment:
    """When to kill; to be asked again and again."""

    def __init__(self, cluster: Cluster, whole: float, draw: random.Random):
        # Later than the end in one of four starts, so that runs finish.
        self._moment = cluster.started + draw.uniform(0, whole * 4 / 3)
        self._cluster = cluster

    def come(self) -> str:
        """What is going on if it has come, else ""."""
        return self._cluster.last_line() if time.monotonic() >= self._moment else ""


class MomentDuring:
    """Some time after the first or the second beginning of what --during names; a start that has
    no second one, as of a roll-call, finishes the run.
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
        if self._what == "save":  # what was left by the start before is gone at the first step
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
    parser.add_argument("--during", choices=DURING, help="kill then, not at random moments")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=5, help="of overhead")
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
    # This one compiles nothing, as those after a kill.
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
        said = f"differs in {len(different)}: {different[:3]}" if different else "is the same"
        print(f"run {runs}, {len(kills)} kills so far: {said} to the bit", flush=True)
    ended, back = [k.ended for k in kills], [k.back for k in kills if k.back is not None]
    print(f"{count} processes, {len(kills)} kills in {runs} runs, {differing} of them differ")
    for what, values in (("until all had ended", ended), ("from start to next step", back)):
        print(f"{what}: median {statistics.median(values):.1f} s, largest {max(values):.1f} s")


def _disturb(
    options: argparse.Namespace, name: str, whole: float, draw: random.Random
) -> Iterator[Kill]:
    """Starts the run until it has finished; about four kills on the way."""
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
                sys.exit(f"error: {name} failed by itself with {codes}; see {cluster.logs[0]}.")
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
    """The last step in metrics.jsonl, 0 before the first."""
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    whole = [line for line in lines if line.endswith("}")]
    return json.loads(whole[-1])["step"] if whole else 0


def compare_runs(first: pathlib.Path, second: pathlib.Path, steps: int) -> list[str]:
    """What is not the same to the bit: arrays of the last checkpoint, numbers of logged steps."""
    different = verify_resume.compare(
        *(load_arrays(workdir / "checkpoints", steps)[1] for workdir in (first, second))
    )
    for key, numbers in read_metrics(first).items():
        if numbers != read_metrics(second).get(key):
            different.append(f"{key[0]} of step {key[1]}")
    return different


def read_metrics(workdir: pathlib.Path) -> dict[tuple[str, int], dict[str, float]]:
    """(split, step) -> what was measured, without what the clock says."""
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
    print("steps, processes x devices: loss of the run that changed, of the one that did not")
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
    """Of configs/tiny.py as it is, between its first step and its last."""
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
            f"{kind}: {', '.join(f'{value:.2f}' for value in values)} s; of neither "
            f"{statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})"
        )


def _wait_for(cluster: Cluster, said: str) -> float:
    """When process 0 says it, by the clock."""
    while cluster.running():
        if said in cluster.logs[0].read_text(errors="replace"):
            break
        time.sleep(0.01)
    return time.monotonic()


if __name__ == "__main__":
    main()
