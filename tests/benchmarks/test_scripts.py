"""benchmarks/: command lines of all scripts, data folders, and the schedule of on_gpu."""

import dataclasses
import importlib.util
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


# --- python -m benchmarks.on_gpu with a simulated clock that advances only during sleeps ---


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
        from benchmarks.on_gpu import schedule

        results = schedule.Results(folder)
        end = self.now + seconds
        schedule.run(jobs, results, end, start=self.start, clock=self.clock, sleep=self.sleep)
        return {line["job"]: line for line in results.read() if line["kind"] == "end"}


@settings(max_examples=15, deadline=None)
@given(
    durations=st.lists(st.floats(0.1, 1e6), min_size=15, max_size=15),
    minutes=st.floats(1, 20),
    obeys=st.booleans(),
)
def test_the_gpu_jobs_end_within_the_minutes(tmp_path_factory, durations, minutes, obeys):
    from benchmarks.on_gpu import __main__ as on_gpu
    from benchmarks.on_gpu import schedule

    folder = tmp_path_factory.mktemp("run")
    jobs = on_gpu.list_jobs(folder, None, smoke=False)
    scripts = {job.name: Script(s, obeys=obeys) for job, s in zip(jobs, durations, strict=False)}
    machine = Machine(scripts)
    ends = machine.run(jobs, folder, 60 * minutes)
    assert machine.now - 1000 < 60 * minutes + 3 * schedule.POLL
    assert set(ends) == {job.name for job in jobs}


def test_gpu_jobs_that_hang_leave_time_for_every_section(tmp_path):
    from benchmarks.on_gpu import __main__ as on_gpu

    jobs = on_gpu.list_jobs(tmp_path, None, smoke=False)
    ends = Machine({job.name: Script(1e9) for job in jobs}).run(jobs, tmp_path, 780)
    for section in ("environment", "kernels", "step small", "step base", "pretrain"):
        assert ends[section]["status"] in ("killed", "stopped"), section
    assert ends["pretrain"]["seconds"] >= 30


def test_a_second_call_repeats_what_failed_or_hung(tmp_path):
    from benchmarks.on_gpu.schedule import Job

    jobs = [Job(name, [], 10.0) for name in "abc"]
    ends = Machine({"b": Script(code=1), "c": Script(1e9, obeys=False)}).run(jobs, tmp_path, 100)
    assert [ends[name]["status"] for name in "abc"] == ["done", "failed", "killed"]
    second = Machine()
    ends = second.run(jobs, tmp_path, 100)
    assert second.ran == ["b", "c"]
    assert {line["status"] for line in ends.values()} == {"done"}


def test_a_real_process_is_killed_with_its_children(tmp_path):
    from benchmarks.on_gpu import schedule

    code = "import subprocess, time; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    job = schedule.Job("two words", [sys.executable, "-c", code], 3)
    started = time.monotonic()
    schedule.run([job], schedule.Results(tmp_path), started + 100)
    assert time.monotonic() - started < 30
    (line,) = schedule.Results(tmp_path).read()
    assert (line["status"], line["code"], line["log"]) == ("killed", -9, "begun\n")


def test_a_rehearsal_writes_the_results_of_a_job(tmp_path, monkeypatch):
    import jax

    from benchmarks.on_gpu import __main__ as on_gpu
    from benchmarks.on_gpu.schedule import Results

    command = ["on_gpu", f"--folder={tmp_path}", "--smoke", "--job=environment"]
    monkeypatch.setattr(sys, "argv", command)
    on_gpu.main()
    (line,) = Results(tmp_path).read()
    assert line["packages"]["jax"] == jax.__version__
    assert line["device_kind"] == "cpu"
    # as where PyTorch is installed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    words = [word for job in on_gpu.list_jobs(tmp_path, None, False) for word in job.command]
    names = {match[1] for word in words if (match := re.match(r"--job=(\w+)", word))}
    assert names == set(on_gpu.CHILDREN)


@pytest.mark.parametrize("smoke", [False, True])
def test_the_pretraining_on_a_gpu_is_a_valid_command(smoke, tmp_path):
    import convbert_jax
    from benchmarks.on_gpu import __main__ as on_gpu
    from convbert_jax.command_line import overrides

    *_, pretrain = on_gpu.list_jobs(tmp_path, tmp_path / "text", smoke)
    _, _, module, *arguments = pretrain.command
    fields, rest = overrides.take(arguments)
    assert (module, rest[-1]) == ("convbert_jax.main", f"--workdir={tmp_path / 'pretrain'}")
    config = convbert_jax.load_config("tiny" if smoke else "small", **fields)
    assert config.data.source == f"text:{tmp_path / 'text'}/**/*.txt"
    assert config.model.scan_unroll == config.model.layers
    assert config.checkpoint.every < config.train.steps
