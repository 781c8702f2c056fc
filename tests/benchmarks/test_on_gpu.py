"""The quarter of an hour with a GPU, rehearsed on a CPU: a fake clock and tiny shapes."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import tarfile
import time

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convbert_jax
from benchmarks.on_gpu import __main__ as on_gpu
from benchmarks.on_gpu import environment, pytorch, schedule, steps
from benchmarks.on_gpu.schedule import Job, Results
from convbert_jax.command_line import overrides
from convbert_jax.recipes.planning import traced
from tests import compiling
from tests.conftest import REPOSITORY

# --- The schedule, by a fake clock ---


class Clock:
    """Time passes only while somebody sleeps."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@dataclasses.dataclass
class Play:
    """What a played job does: for how long it runs, its exit code, whether SIGTERM ends it."""

    seconds: float = 1.0
    code: int = 0
    obeys: bool = True


class Played:
    """Plays processes; `ran` has (name, start, end, signals) of each, times from 0."""

    def __init__(self, plays=None):
        self.clock, self.plays, self.ran = Clock(), plays or {}, {}

    def start(self, job, folder):
        play = self.plays.get(job.name, Play())
        began = self.clock()
        record = self.ran[job.name] = [began - 1000, None, []]
        clock = self.clock

        class Process:
            ends, code = began + play.seconds, play.code

            def poll(self):
                if clock() < self.ends:
                    return None
                record[1] = record[1] or clock() - 1000
                return self.code

            def send(self, number):
                record[2].append(number)
                if number == signal.SIGKILL or play.obeys:
                    self.ends, self.code = min(self.ends, clock()), -number

            def tail(self):
                return "the last line"

        return Process()

    def run(self, jobs, folder, seconds):
        results = Results(folder)
        end = self.clock() + seconds
        schedule.run(jobs, results, end, start=self.start, clock=self.clock, sleep=self.clock.sleep)
        return {line["job"]: line for line in results.read() if line["kind"] == "end"}


def job(name, seconds=10.0, **more):
    return Job(name, [], seconds, **more)


SOON = 3 * schedule.POLL


def test_jobs_run_one_after_the_other_and_a_failed_one_stops_no_other(tmp_path):
    played = Played({"a": Play(5), "b": Play(3, code=1), "c": Play(2)})
    ends = played.run([job("a"), job("b"), job("c")], tmp_path, 100)
    assert {name: line["status"] for name, line in ends.items()} == {
        "a": "done",
        "b": "failed",
        "c": "done",
    }
    assert (ends["b"]["code"], ends["b"]["log"]) == (1, "the last line")
    assert played.ran["c"][0] == pytest.approx(8, abs=SOON)


def test_a_job_that_hangs_is_killed_at_its_limit(tmp_path):
    played = Played({"a": Play(1e9, obeys=False)})
    ends = played.run([job("a"), job("b")], tmp_path, 100)
    assert ends["a"]["status"] == "killed"
    assert played.ran["a"][1:] == [pytest.approx(10, abs=SOON), [signal.SIGKILL]]
    assert ends["b"]["status"] == "done"


def test_a_second_call_skips_what_is_done(tmp_path):
    jobs = [job("a"), job("b"), job("c")]
    Played({"b": Play(code=1), "c": Play(1e9)}).run(jobs, tmp_path, 100)
    second = Played()
    ends = second.run(jobs, tmp_path, 100)
    assert set(second.ran) == {"b", "c"}
    assert {line["status"] for line in ends.values()} == {"done"}


def test_a_job_in_the_background_has_its_own_limit(tmp_path):
    played = Played({"compile": Play(1e9), "a": Play(8), "b": Play(8), "last": Play(1)})
    jobs = [
        job("compile", 10, background=True),
        job("a"),
        job("b"),
        job("other", background=True),
        job("last", alone=True),
    ]
    played.plays["other"] = Play(5)
    played.run(jobs, tmp_path, 100)
    assert played.ran["a"][0] == 0
    assert played.ran["compile"][1] == pytest.approx(10, abs=SOON)  # while b runs
    assert played.ran["last"][0] == pytest.approx(21, abs=2 * SOON)  # after other


def test_a_job_with_grace_is_asked_to_stop_before_it_is_killed(tmp_path):
    played = Played({"polite": Play(1e9), "deaf": Play(1e9, obeys=False)})
    jobs = [job("polite", 50, grace=20), job("deaf", 50, grace=20)]
    ends = played.run(jobs, tmp_path, 200)
    assert played.ran["polite"][1:] == [pytest.approx(30, abs=SOON), [signal.SIGTERM]]
    assert ends["polite"]["status"] == "stopped"  # and a second call continues it
    assert played.ran["deaf"][2] == [signal.SIGTERM, signal.SIGKILL]
    assert ends["deaf"]["status"] == "killed"


def test_a_job_leaves_the_time_that_later_ones_need(tmp_path):
    played = Played({"long": Play(1e9)})
    ends = played.run([job("long", 80, reserve=60), job("none", reserve=60)], tmp_path, 100)
    assert played.ran["long"][1] == pytest.approx(40, abs=SOON)
    assert ends["none"]["status"] == "skipped"


@settings(max_examples=25, deadline=None)
@given(
    durations=st.lists(st.floats(0.1, 1e6), min_size=15, max_size=15),
    minutes=st.floats(1, 20),
    obeys=st.booleans(),
)
def test_nothing_runs_longer_than_the_minutes(tmp_path_factory, durations, minutes, obeys):
    folder = tmp_path_factory.mktemp("run")
    jobs = on_gpu.list_jobs(folder, None, smoke=False)
    plays = {one.name: Play(s, obeys=obeys) for one, s in zip(jobs, durations, strict=False)}
    played = Played(plays)
    ends = played.run(jobs, folder, 60 * minutes)
    assert played.clock() - 1000 < 60 * minutes + SOON
    assert set(ends) == {one.name for one in jobs}


def test_the_worst_case_still_reaches_every_section(tmp_path):
    """Everything hangs until its limit, in thirteen minutes."""
    jobs = on_gpu.list_jobs(tmp_path, None, smoke=False)
    played = Played({one.name: Play(1e9) for one in jobs})
    ends = played.run(jobs, tmp_path, 780)
    for section in ("environment", "kernels", "step small", "step base", "pretrain"):
        assert ends[section]["status"] in ("killed", "stopped"), section
    assert ends["pretrain"]["seconds"] >= 30


def test_results_survive_a_cut_off_line(tmp_path):
    results = Results(tmp_path)
    results.write("a", "end", status="done")
    with open(tmp_path / "results.jsonl", "a") as file:
        file.write('{"job": "b", "kind": "en')
    results.write("c", "end", status="done")
    results.write("d", "end", status="done")
    assert results.done() >= {"a", "d"}


def test_a_real_process_is_killed_with_its_children(tmp_path):
    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    long = Job("two words", [sys.executable, "-c", code], 3)
    started = time.monotonic()
    schedule.run([long], Results(tmp_path), started + 100)
    assert time.monotonic() - started < 30
    (line,) = Results(tmp_path).read()
    assert (line["status"], line["code"], line["log"]) == ("killed", -9, "begun\n")


# --- The jobs ---


def test_flags_of_the_compiler(tmp_path, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    jobs = {one.name: one for one in on_gpu.list_jobs(tmp_path, None, smoke=False)}
    quick = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
    assert jobs["step base"].environment["XLA_FLAGS"] == quick
    assert "XLA_FLAGS" not in jobs["step base autotuned"].environment
    names = list(jobs)
    assert names.index("step base") < names.index("step small autotuned") < names.index("pretrain")


def test_pretraining_reads_a_folder(tmp_path):
    (pretrain,) = (x for x in on_gpu.list_jobs(tmp_path, tmp_path / "text", False) if x.alone)
    assert f"--config.data.source=text:{tmp_path / 'text'}/**/*.txt" in pretrain.command


@pytest.mark.parametrize("smoke", [False, True])
def test_the_command_of_pretraining_is_a_config(smoke, tmp_path):
    *_, pretrain = on_gpu.list_jobs(tmp_path, None, smoke)
    _, _, module, *arguments = pretrain.command
    fields, rest = overrides.take(arguments)
    assert (module, rest[-1]) == ("convbert_jax.main", f"--workdir={tmp_path / 'pretrain'}")
    config = convbert_jax.load_config("tiny" if smoke else "small", **fields)
    assert config.model.scan_unroll == config.model.layers
    assert config.checkpoint.every < config.train.steps


def test_every_job_of_a_child_is_known(tmp_path):
    for one in on_gpu.list_jobs(tmp_path, None, smoke=True):
        for argument in one.command:
            if name := re.match("--job=(.*)", argument):
                assert name[1].split()[0] in on_gpu.CHILDREN


def test_wheels_are_requirements():
    listed = (REPOSITORY / "benchmarks" / "on_gpu" / "wheels.txt").read_text().split()
    required = (REPOSITORY / "requirements.txt").read_text()
    assert listed
    for name in listed:
        assert re.search(rf"^{name}\b", required, re.MULTILINE)


def test_wrong_arguments(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["on_gpu", f"--data={tmp_path / 'none'}"])
    with pytest.raises(SystemExit) as raised:
        on_gpu.main()
    assert raised.value.code == 2


def figures(folder, name):
    return [x for x in Results(folder).read() if (x["job"], x["kind"]) == (name, "figures")]


def test_environment(tmp_path):
    environment.describe(Results(tmp_path), "environment", smoke=True)
    line = figures(tmp_path, "environment")[0]
    assert line["packages"]["jax"] == jax.__version__
    assert line["device_kind"] == "cpu"


def test_kernels_are_compared_with_xla_and_float64(tmp_path):
    environment.check_kernels(Results(tmp_path), "kernels", smoke=True)
    lines = figures(tmp_path, "kernels")
    assert [x["against"] for x in lines] == ["xla", "float64"] * 3
    for line in lines:
        assert line["error"] < 2e-5, line
        assert line["error"] > 1e-9 or line["against"] == "xla", line  # not compared with itself
        assert len(line["errors"]) == (6 if "span" in line["kernel"] else 3)
    assert len({x["seed"] for x in lines}) == len(lines)


def test_a_kernel_that_raises_ends_no_other(tmp_path, monkeypatch):
    seeds = []

    def measure(function, definition, arguments, seed, exact):
        seeds.append(seed)
        if len(seeds) in (2, 3):
            raise NotImplementedError("no such instruction")
        return {"the output": 0.5}

    monkeypatch.setattr(environment, "_measure", measure)
    environment.check_kernels(Results(tmp_path), "kernels", smoke=True)
    found = [x["error"] for x in figures(tmp_path, "kernels")]
    raised = "NotImplementedError: no such instruction"
    assert found == [0.5, raised, raised, 0.5, 0.5, 0.5]


# A trace is of the whole process, and the profiler crashes in that of many tests.
MEASURE = """
import pathlib, sys, types
import jax, jax.numpy as jnp
from benchmarks.on_gpu import steps
from benchmarks.on_gpu.schedule import Results
from convbert_jax.training import program

def step(state, batch):
    return jnp.tanh(state @ state), None, jnp.sum(batch["tokens"])

if sys.argv[2] == "stub":
    program.make_program = lambda *_: types.SimpleNamespace(
        abstract=jnp.ones((64, 64)),
        init=lambda key: jnp.ones((64, 64)),
        put_batch=lambda batch: batch,
        train_step=jax.jit(step),
    )
steps.ROUNDS = 1
steps.measure(Results(pathlib.Path(sys.argv[1])), "step tiny", smoke=True)
"""


@pytest.mark.parametrize("program", ["stub", pytest.param("whole", marks=pytest.mark.slow)])
def test_a_step_and_its_profile(tmp_path, program):
    subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path, program],
        cwd=REPOSITORY,
        env={**os.environ, "XLA_FLAGS": compiling.CHEAPLY},
        check=True,
    )
    speed, profile = Results(tmp_path).read()
    assert [speed["kind"], profile["kind"]] == ["figures", "profile"]
    assert speed["ms"] > 0
    if program == "stub":
        assert speed["tokens_per_s"] == pytest.approx(4 * 16 / speed["ms"] * 1e3)
    assert 0 < len(profile["kernels"]) <= steps.KERNELS
    assert sum(kernel[3] for kernel in profile["kernels"]) <= 1.001
    if program == "stub":  # with fewer kernels than lines, they are the whole time
        total = sum(kernel[2] for kernel in profile["kernels"])
        assert total == pytest.approx(profile["us"], rel=0.1)


@pytest.mark.parity
@pytest.mark.parametrize("model", [pytest.param("convbert", marks=pytest.mark.slow), "bert"])
def test_a_step_of_pytorch(model, tmp_path, monkeypatch):
    pytest.importorskip("torch"), pytest.importorskip("transformers")
    monkeypatch.setattr(pytorch, "ROUNDS", 1)
    monkeypatch.setattr(pytorch, "IN_A_ROW", 1)
    pytorch.measure(Results(tmp_path), f"pytorch tiny {model}", smoke=True)
    (line,) = figures(tmp_path, f"pytorch tiny {model}")
    assert line["tokens_per_s"] > 0


@pytest.mark.parity
@pytest.mark.parametrize("size", ["small", "base"])
def test_pytorch_has_models_of_our_sizes(size):
    """ConvBERT's discriminator with its head has as many parameters as ours."""
    torch, _ = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = steps.read_config(size, smoke=False)
    with torch.device("meta"):
        network, _ = pytorch._convbert(config, "meta")
    found = sum(p.numel() for n in ("discriminator", "head") for p in network[n].parameters())
    shapes = jax.eval_shape(traced.make_task(config, jax.devices()[0]).init, jax.random.key(0))
    ours = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "generator" not in jax.tree_util.keystr(path)
    )
    assert found == ours


@pytest.mark.parametrize(("size", "variant"), [("small", ""), ("base", ""), ("base", "default")])
def test_steps_are_unrolled(size, variant):
    config = steps.read_config(size, smoke=False, variant=variant)
    assert config.model.scan_unroll == config.model.layers
    assert (config.model.attention_dropout == 0) == (variant == "")


# --- What comes back ---


def test_archives_hold_the_results_and_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(schedule, "ARCHIVE_BYTES", 30_000)
    Results(tmp_path).write("a", "end", status="done")
    run = tmp_path / "pretrain"
    for name in ("20/params/x", "20/opt_state/x", "100/params/x", "100/opt_state/x"):
        path = run / "checkpoints" / name
        path.parent.mkdir(parents=True)
        path.write_bytes(np.random.default_rng(0).bytes(50_000))
    for name in ("config.json", "vocabulary/tokenizer.model", "data/train.array_record"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.log").write_text("fine")
    (tmp_path / "logs" / "wild.log").write_bytes(bytes(100_000))
    found = schedule.pack(tmp_path, on_gpu.list_weights(run))
    assert [path.name for path in found] == ["large.tar.gz.0", "large.tar.gz.1", "results.tar.gz"]
    assert all(path.stat().st_size <= 30_000 for path in found)
    whole = tmp_path / "whole"
    whole.write_bytes(found[0].read_bytes() + found[1].read_bytes())
    with tarfile.open(whole) as tar:
        names = {m.name for m in tar if m.isfile()}
    assert names == {
        *("pretrain/config.json", "pretrain/vocabulary/tokenizer.model"),
        "pretrain/checkpoints/100/params/x",
    }
    with tarfile.open(found[2]) as tar:
        assert {"results.jsonl", "logs/a.log"} <= set(tar.getnames())
        assert "logs/wild.log" not in tar.getnames()
    monkeypatch.setattr(schedule, "ARCHIVE_BYTES", 5_000)  # the weights are too large
    assert [x.name for x in schedule.pack(tmp_path, on_gpu.list_weights(run))] == ["results.tar.gz"]
