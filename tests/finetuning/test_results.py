"""Records of finished runs, and errors for damaged records."""

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import storage
from convbert_jax.finetuning import run_files
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.workdir import Workdir
from tests.refusals import refused

RUN = run_files.RunResult(
    task="toy",
    setting=Setting(1e-3, 3.0),
    seed=0,
    steps=30,
    loss=0.5,
    scores={"validation": {"accuracy": 0.75, "mcc": math.nan}},
    seconds=2.0,
    examples_per_second=100.0,
)


def write(folder, *lines: bytes):
    Workdir(folder).results.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.fixture
def line(tmp_path) -> bytes:
    run_files.append_result(Workdir(tmp_path), RUN)
    return Workdir(tmp_path).results.read_bytes().rstrip(b"\n")


def test_it_comes_back(tmp_path, line):
    (found,) = run_files.read_results(Workdir(tmp_path))
    assert math.isnan(found.scores["validation"].pop("mcc"))
    assert found.setting == RUN.setting
    assert found.scores == {"validation": {"accuracy": 0.75}}
    assert run_files.read_results(Workdir(tmp_path / "nowhere")) == []


@settings(max_examples=60)
@given(bit=st.integers(min_value=0))
def test_a_flipped_bit_of_a_result_never_passes_unseen(bit, tmp_path_factory):
    workdir = Workdir(tmp_path_factory.mktemp("run"))
    for seed in range(3):
        run_files.append_result(workdir, dataclasses.replace(RUN, seed=seed))
    before = repr(run_files.read_results(workdir))
    lines = workdir.results.read_bytes().splitlines(keepends=True)
    content = bytearray(lines[1])
    place = bit % (8 * len(content) - 8)  # not the newline, whose loss joins two lines
    content[place // 8] ^= 1 << place % 8
    workdir.results.write_bytes(b"".join([lines[0], bytes(content), lines[2]]))
    found = message = ""
    try:
        found = repr(run_files.read_results(workdir))
    except storage.DamagedFileError as error:
        message = str(error)
    assert found == before or (str(workdir.results) in message and "line 2" in message)


def test_a_result_is_plain_json_for_other_software(line):
    assert json.loads(line)["scores"]["validation"]["accuracy"] == 0.75


def damages(line: bytes):
    values = json.loads(line)
    del values["crc32"]  # which would detect all of these
    found = {
        "empty": b"",
        "cut": line[:40],
        "not UTF-8": line.replace(b"toy", b"t\xe9y"),
        "NUL": bytes(50),
        "list": b"[]",
        "number": b"1",
        "nested": b"[" * 100_000,
        "a newer field": json.dumps(values | {"device": "cpu"}).encode(),
        "scores": json.dumps(values | {"scores": {"validation": 0.5}}).encode(),
        "a score": json.dumps(values | {"scores": {"validation": {"mcc": "high"}}}).encode(),
        "settings": json.dumps(values | {"setting": {"epochs": 3}}).encode(),
        "a setting": json.dumps(
            values | {"setting": {"epochs": 3, "learning_rate": None}}
        ).encode(),
    }
    for name, value in values.items():
        wrong = 7 if isinstance(value, str) else "x"
        found[f"{name} of another type"] = json.dumps(values | {name: wrong}).encode()
        found[f"{name} is a list"] = json.dumps(values | {name: [1]}).encode()
        found[f"no {name}"] = json.dumps({k: v for k, v in values.items() if k != name}).encode()
    return found


def test_a_damaged_line_is_named_and_the_others_are_kept(tmp_path, line):
    for content in damages(line).values():
        write(tmp_path, line, content, line)
        with refused(storage.DamagedFileError, Workdir(tmp_path).results, "line 2"):
            run_files.read_results(Workdir(tmp_path))
        write(tmp_path, line, line)  # the fix that the error suggests
        assert len(run_files.read_results(Workdir(tmp_path))) == 2


def test_what_a_kill_cut_off_is_taken_away(tmp_path, line):
    file = Workdir(tmp_path).results
    for end in (line[:-3], b"\xff\x00", b"{"):
        file.write_bytes(line + b"\n" + end)
        assert len(run_files.read_results(Workdir(tmp_path))) == 1
        assert file.read_bytes() == line + b"\n"


def test_a_result_without_a_score_of_its_task_is_refused(tmp_path, line):
    runs = run_files.read_results(Workdir(tmp_path))
    run_files.check_scores(Workdir(tmp_path), runs, ("validation",), ("accuracy", "mcc"))
    for splits, metrics in ((("validation", "test"), ("mcc",)), (("validation",), ("f1",))):
        with refused(storage.DamagedFileError, Workdir(tmp_path).results, "toy", metrics[0]):
            run_files.check_scores(Workdir(tmp_path), runs, splits, metrics)
