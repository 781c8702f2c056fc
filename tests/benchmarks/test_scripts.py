"""benchmarks/: command lines of all scripts, data folders, and the jobs of on_gpu and on_tpu."""

import argparse
import dataclasses
import importlib.util
import json
import re
import runpy
import signal
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import REPOSITORY


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_every_script_parses_its_command_line(monkeypatch, capsys):
    files = [f for f in (REPOSITORY / "benchmarks").rglob("*.py") if "__main__" in f.read_text()]
    assert len(files) > 15
    for file in files:
        if "import torch" in file.read_text() and importlib.util.find_spec("torch") is None:
            continue
        name = ".".join(file.relative_to(REPOSITORY).with_suffix("").parts)
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit) as raised:
            runpy.run_module(name, run_name="__main__")
        assert (raised.value.code, "usage: " in capsys.readouterr().out) == (0, True), name


def test_a_benchmark_without_its_data_names_the_variable(monkeypatch, tmp_path):
    from benchmarks import public_data

    monkeypatch.setenv("CONVBERT_DATA", str(tmp_path / "absent"))
    with pytest.raises(SystemExit, match="CONVBERT_DATA"):
        public_data.folder()


def test_configs_and_pages_name_no_data_folder_of_the_benchmarks():
    from configs import glue, squad, text

    own = map(text.get_config, text.TASKS)
    for config in (glue.get_config("cola"), squad.get_config("v2"), *own):
        assert not config.finetune.data
        assert not config.task.folder
    for place in ("convbert_jax", "configs", "launch", "README.md"):
        root = REPOSITORY / place
        for path in [root] if root.is_file() else sorted(root.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                assert not re.search("shared/data|CONVBERT_DATA", path.read_text("utf-8")), path


# --- on_gpu and on_tpu with a simulated clock that advances only during sleeps ---


def list_jobs(device, folder, *, rehearse=False, data=None):
    listed = importlib.import_module(f"benchmarks.on_{device}").list_jobs
    options = {"folder": folder, "rehearse": rehearse, "data": data, "topology": "v5e:1x1"}
    return listed(argparse.Namespace(**options))


@dataclasses.dataclass
class Script:
    """Simulated job: seconds until it ends, exit code, and whether SIGTERM ends it."""

    seconds: float = 1.0
    code: int = 0
    obeys: bool = True


class Machine:
    """Simulates processes and time; `ran` lists their names in order."""

    def __init__(self, scripts=None):
        self.now, self.scripts, self.ran = 1000.0, scripts or {}, []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def start(self, job, folder):
        script, machine = self.scripts.get(job.name, Script()), self
        self.ran.append(job.name)

        class Process:
            ends, code = machine.now + script.seconds, script.code

            def poll(self):
                return None if machine.now < self.ends else self.code

            def send(self, number):
                if number == signal.SIGKILL or script.obeys:
                    self.ends, self.code = min(self.ends, machine.now), -number

            def tail(self):
                return "the last line"

        return Process()

    def run(self, jobs, folder, seconds) -> dict[str, dict]:
        """Returns the last record of each job."""
        from benchmarks.on_device import schedule

        results = schedule.Results(folder)
        end = self.now + seconds
        schedule.run(jobs, results, end, start=self.start, clock=self.clock, sleep=self.sleep)
        return {line["job"]: line for line in results.read() if line["kind"] == "end"}


@pytest.mark.parametrize("device", ["gpu", "tpu"])
@settings(max_examples=8, deadline=None)
@given(
    durations=st.lists(st.floats(0.1, 1e6), min_size=15, max_size=15),
    minutes=st.floats(1, 20),
    obeys=st.booleans(),
)
def test_the_jobs_end_within_the_minutes(device, tmp_path_factory, durations, minutes, obeys):
    from benchmarks.on_device import schedule

    folder = tmp_path_factory.mktemp("run")
    jobs = list_jobs(device, folder)
    scripts = {job.name: Script(s, obeys=obeys) for job, s in zip(jobs, durations, strict=False)}
    machine = Machine(scripts)
    ends = machine.run(jobs, folder, 60 * minutes)
    assert machine.now - 1000 < 60 * minutes + 3 * schedule.POLL
    assert set(ends) == {job.name for job in jobs}


@pytest.mark.parametrize(
    ("device", "seconds", "sections"),
    [
        ("gpu", 780, "environment, kernels gpu, step small, step base, babylm rtd"),
        ("tpu", 3_580, "doctor, kernels tpu, step small 128x128 default, resume small"),
    ],
)
def test_jobs_that_hang_leave_time_for_every_section(device, seconds, sections, tmp_path):
    jobs = list_jobs(device, tmp_path)
    ends = Machine({job.name: Script(1e9) for job in jobs}).run(jobs, tmp_path, seconds)
    for section in sections.split(", "):
        assert ends[section]["status"] in ("killed", "stopped"), section
        assert ends[section]["seconds"] >= 29


def test_a_second_call_repeats_what_failed_or_hung(tmp_path):
    from benchmarks.on_device.schedule import Job

    jobs = [Job(name, [], 10.0) for name in "abc"]
    ends = Machine({"b": Script(code=1), "c": Script(1e9, obeys=False)}).run(jobs, tmp_path, 100)
    assert [ends[name]["status"] for name in "abc"] == ["done", "failed", "killed"]
    second = Machine()
    ends = second.run(jobs, tmp_path, 100)
    assert second.ran == ["b", "c"]
    assert {line["status"] for line in ends.values()} == {"done"}


def test_a_real_process_is_killed_with_its_children(tmp_path):
    from benchmarks.on_device import schedule

    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    job = schedule.Job("two words", [sys.executable, "-c", code], 3)
    started = time.monotonic()
    schedule.run([job], schedule.Results(tmp_path), started + 100)
    assert time.monotonic() - started < 30
    (line,) = schedule.Results(tmp_path).read()
    assert (line["status"], line["code"], line["log"]) == ("killed", -9, "begun\n")


def test_a_rehearsal_writes_the_results_of_a_job(tmp_path, monkeypatch):
    import jax

    from benchmarks.on_device import session
    from benchmarks.on_device.schedule import Results

    command = ["session", "environment", f"--folder={tmp_path}", "--rehearse"]
    monkeypatch.setattr(sys, "argv", command)
    session.main()
    (line,) = Results(tmp_path).read()
    assert line["packages"]["jax"] == jax.__version__
    assert line["device_kind"] == "cpu"


def test_every_kind_of_job_is_in_a_list(tmp_path, monkeypatch):
    from benchmarks.on_device import session

    # as where PyTorch and libtpu are installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    jobs = list_jobs("gpu", tmp_path) + list_jobs("tpu", tmp_path)
    assert {job.name.split()[0] for job in jobs if "--folder" in str(job.command)} == set(
        session.CHILDREN
    )


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_pretraining_on_a_gpu_is_a_valid_command(rehearse, tmp_path):
    from convbert_jax.config import to_dict

    jobs = list_jobs("gpu", tmp_path, rehearse=rehearse, data=tmp_path / "text")
    for recipe, job in zip(("replaced_token", "masked_lm"), jobs[-2:], strict=True):
        config = config_of(job)
        assert (config.recipe, config.model.attention_dropout) == (recipe, 0)
        assert config.data.source == f"text:{tmp_path / 'text'}/**/*.txt"
        assert config.data.directory == str(tmp_path / "text")
        assert to_dict(config)["train"]["steps"] == (4 if rehearse else "10 epochs")


def config_of(job):
    """Return the config of a job that runs main.py."""
    import convbert_jax
    from convbert_jax.command_line import overrides

    _, _, module, config, *arguments = job.command
    assert module == "convbert_jax.main"
    fields, _ = overrides.take(arguments)
    return convbert_jax.load_config(config.removeprefix("--config="), **fields)


@pytest.mark.parametrize("rehearse", [False, True])
def test_the_plans_on_a_tpu_are_of_the_measured_steps(rehearse, tmp_path, monkeypatch):
    from benchmarks.on_device import steps

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    jobs = {job.name: job for job in list_jobs("tpu", tmp_path, rehearse=rehearse)}
    plans = [name for name in jobs if name.startswith("plan ")]
    assert len(plans) == (1 if rehearse else 4)
    for name in plans:
        step = name.replace("plan", "step", 1)
        assert step in jobs
        assert config_of(jobs[name]) == steps.read_config(step, rehearse)


def test_measured_times_are_divided_by_predicted_ones(tmp_path):
    from benchmarks.on_device import tpu
    from benchmarks.on_device.schedule import Results

    results = Results(tmp_path)
    results.write("step small 128x128 default", "figures", ms=30.0)
    results.write("step base 64x512 microbatches", "figures", ms=1.0)  # was not planned
    results.write("layers 64x128", "figures", ms={"attention": 3.0, "convbert, xla": 5.0})
    predicted = {"attention": 2.0, "convbert, xla": None}
    results.write("layers 64x128 predicted v5e", "figures", ms=predicted)
    (tmp_path / "plans").mkdir()
    plans = {"small_128x128_default": {"seconds_of_a_step": [0.02, 0.06]}, "tiny": {"fits": False}}
    for name, plan in plans.items():
        (tmp_path / "plans" / f"{name}.json").write_text(json.dumps(plan))
    tpu.write_calibration(results)
    found = json.loads((tmp_path / "calibration.json").read_text())
    assert {name: row["ratio"] for name, row in found.items()} == {
        "step small 128x128 default": [1.5, 0.5],
        "layers 64x128 attention": [1.5],
    }
