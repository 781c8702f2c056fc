"""Several processes that do not have the same: one sentence on each of them, before any compile."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.config import Config
from convbert_jax.training.environment import exchange, roll_call

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
PATIENCE = 120  # seconds
# Arguments: port, processes, number of this one, and statements before all are called.
PROGRAM = """
import sys, dataclasses
from convbert_jax import console
from convbert_jax.config import Config, UserError
from convbert_jax.training.environment import exchange, meeting, peers, roll_call
port, count, index, does = sys.argv[1:]
console.set_up_logging()
place = meeting.Place(f"localhost:{port}", int(count), int(index))
config, versions = Config(), roll_call.versions()
try:
    with peers.together(place, patience=60, silence=60, advise=lambda missing: "start it"):
        exec(does)
        roll_call.versions = lambda: versions
        roll_call.check_flags({"--mode": "train"})
        roll_call.check_start(config)
        roll_call.check_data(config, "f" * 64)
        print("clocks", exchange.clock_offsets(20.0))
except UserError as error:
    from jax._src import xla_bridge
    print("backends", sorted(xla_bridge._backends))
    console.fail(str(error))
"""


def run(*does: str, count: tuple[int, ...] = ()) -> list[tuple[int, str]]:
    """(code, what it printed) of a process for each text of statements.

    Args:
      count: of processes, as each of them is told.
    """
    count = count or (len(does),) * len(does)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(count[index]), str(index), what],
            cwd=REPOSITORY,
            env=os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, what in enumerate(does)
    ]
    ends = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, ends, strict=True)]


def sentences(ends) -> list[str]:
    assert [code for code, _ in ends] == [1] * len(ends), ends
    lines = [[li for li in text.splitlines() if li.startswith("error: ")] for _, text in ends]
    assert [len(each) for each in lines] == [1] * len(ends), ends
    assert "Check failure" not in str(ends)
    return [each[0] for each in lines]


def test_another_version_is_told_before_devices_are_looked_for():
    ends = run("", "versions['jaxlib'] = '0.0.1'")
    (first, second) = sentences(ends)
    here = roll_call.versions()["jaxlib"]
    assert first == second
    assert f"process 1 has jaxlib=0.0.1, process 0 has {here}; install the same" in first
    assert all("backends []" in text for _, text in ends)


@pytest.mark.slow
def test_another_config_is_told_on_all():
    other = "config = dataclasses.replace(config, seed=7)"
    said = sentences(run("", other, other))
    assert len(set(said)) == 1
    assert "processes 1 and 2 have config.seed=7, process 0 has 0; start the same" in said[0]


@pytest.mark.slow
def test_another_number_of_processes_is_told():
    """Before jax, which would connect the two; process 0 goes on waiting for the right one."""
    first, second = sentences(run("", "", count=(2, 3)))
    counts = "--processes=3", "--processes=2"
    assert all(count in second for count in counts)
    assert "process 1 of 2" in first
    assert all(count in first for count in counts)


@pytest.mark.slow
def test_a_process_that_falls_silent_is_told_by_its_number():
    soon = "roll_call._SOON, exchange._MARGIN = 6.0, 9.0"
    ends = run(soon, f"{soon}; import time; time.sleep(14)", soon)
    for code, text in (ends[0], ends[2]):
        assert code == 1
        assert "error: process 1 of 3 said nothing for 6 s after all had connected" in text


@pytest.mark.slow
def test_processes_that_are_the_same_are_one_line():
    (code, first), (other, second) = run("", "config = config")
    assert (code, other) == (0, 0), first + second
    (line,) = [line for line in first.splitlines() if "2 processes: " in line]
    assert "2 processes: 2 x 1 cpu devices, jax " in line
    assert line.endswith(", same config, same data.")
    assert "2 processes: " not in second
    (clocks,) = [line for line in first.splitlines() if line.startswith("clocks")]
    (ahead, within) = eval(clocks.removeprefix("clocks"))[1]
    assert abs(ahead) <= within + 0.05  # one clock


VALUES = st.fixed_dictionaries(
    {"a": st.integers(0, 2), "b": st.sampled_from(["x", "y"])},
    optional={"c": st.just(1)},
)
RECORDS = st.lists(
    st.none() | st.fixed_dictionaries({"versions": VALUES, "command": VALUES}),
    min_size=1,
    max_size=5,
).filter(lambda records: records[0] is not None)


@given(RECORDS)
def test_a_sentence_names_exactly_who_differs(records):
    sentence = roll_call.describe(records, 5.0)
    if None in records:
        silent = [i for i, record in enumerate(records) if record is None]
        assert sentence.startswith(f"{exchange.by_number(silent)} of {len(records)} said nothing")
    elif all(record == records[0] for record in records):
        assert sentence == ""
    else:
        what = next(w for w in records[0] if any(r[w] != records[0][w] for r in records))
        assert sentence.endswith(f"; {roll_call.REMEDIES[what]}.")
        for name in ("a", "b", "c"):
            values = [record[what].get(name, "none") for record in records]
            assert (f" {name}=" in sentence) == (len(set(values)) > 1)
            for value in set(values) - {values[0]}:
                who = [i for i, each in enumerate(values) if each == value]
                has = "has" if len(who) == 1 else "have"
                assert f"{exchange.by_number(who)} {has} {name}={value}" in sentence
        assert len(sentence.splitlines()) == 1


def test_long_values_and_many_fields_stay_one_short_sentence():
    first = {f"config.f{i}": "v" * 500 for i in range(90)}
    other = {name: f"w{'v' * 500}" for name in first}
    sentence = roll_call.describe([{"command": first}, {"command": other}], 5.0)
    assert len(sentence) < 800
    assert "they differ in 87 more" in sentence


def test_a_single_process_has_nobody_to_compare_with(caplog):
    roll_call.check_flags({"--mode": "train"})
    roll_call.check_start(Config())
    roll_call.check_data(Config(), "0" * 64)
    assert exchange.judge({"a": (1, 2)}, lambda values: values, 1.0) == [{"a": [1, 2]}]
    assert not caplog.records
