"""Test runner: order by cost, table of files, measured tiers, complete runs and time budget."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import REPOSITORY
from tests.running import choose_quick

FILES = {
    "test_a.py": "def test_one(): pass\ndef test_two(): pass",
    "test_b.py": "import pytest\n\n@pytest.mark.slow\ndef test_slow(): pass",
    "test_c.py": "import time\n\ndef test_long(): time.sleep(0.7)",
}


@pytest.fixture
def suite(tmp_path):
    """suite(*arguments, **environment) -> (exit code, what pytest prints of tests in FILES)."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n")

    def run(*arguments, **environment):
        result = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.running", *arguments],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # slow to import
                "CONVBERT_TEST_COMPLETE": "",  # CI sets it for the suite
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return result.returncode, result.stdout

    return run


def order_of(printed: str) -> list[str]:
    """Returns files in the order in which one worker ran them."""
    lines = [line for line in printed.splitlines() if "PASSED" in line]
    return list(dict.fromkeys(line.split()[-1].partition("::")[0] for line in lines))


def test_workers_begin_with_the_dearest_file(suite):
    """Ordered by marker at first, then by duration; the table shows the most expensive files."""
    workers = ("-v", "--numprocesses=1", "--dist=loadfile", "--no-loadscope-reorder")
    code, printed = suite(*workers)
    assert code == 0, printed
    assert order_of(printed) == ["test_b.py", "test_a.py", "test_c.py"]
    code, printed = suite(*workers, "--durations=1")
    assert code == 0, printed
    assert order_of(printed)[0] == "test_c.py"
    table = [line.split()[1:] for line in printed.partition("slowest 10 files")[2].splitlines()]
    assert table.index(["1", "tests", "test_c.py"]) < table.index(["2", "tests", "test_a.py"])


@pytest.mark.parametrize("place", ["file", "test", "marker"])
def test_a_package_that_is_not_there_is_an_error_where_all_must_run(suite, tmp_path, place):
    skip = 'pytest.importorskip("no_such_package")'
    content = {
        "file": f"import pytest\n{skip}\ndef test(): pass",
        "test": f"import pytest\ndef test(): {skip}",
        "marker": "import pytest\nfrom tests.running import LACKS\n"
        "@pytest.mark.skipif(True, reason=f\"{LACKS} 'it'\")\ndef test(): pass",
    }[place]
    (tmp_path / "test_d.py").write_text(content)
    code, printed = suite("test_d.py")
    assert "1 skipped" in printed
    assert code in (0, 5)  # pytest returns 5 if no test was collected
    code, printed = suite("test_d.py", CONVBERT_TEST_COMPLETE="1")
    assert code in (1, 2)
    assert "could not import" in printed
    assert "skipped, which is an error here" in printed


def test_other_skips_stay_skips(suite, tmp_path):
    (tmp_path / "test_d.py").write_text("import pytest\ndef test(): pytest.skip('no disk here')")
    code, printed = suite("test_d.py", CONVBERT_TEST_COMPLETE="1")
    assert code == 0, printed


def test_apache_beam_may_be_absent(suite, tmp_path):
    (tmp_path / "test_d.py").write_text(
        "import pytest\nfrom tests.running import NO_BEAM\n"
        "pytest.importorskip('no_such_package', reason=NO_BEAM)\ndef test(): pass"
    )
    code, printed = suite("-rs", "test_d.py", CONVBERT_TEST_COMPLETE="1")
    assert code in (0, 5), printed
    assert "conflicts with the lock files" in printed


def test_a_budget_leaves_out_what_another_run_begins_with(suite):
    """The first run has time for one file; the next one starts with the others."""
    workers = ("-v", "--numprocesses=1", "--dist=loadfile", "--no-loadscope-reorder")
    assert suite(*workers, "test_c.py")[0] == 0  # now the most expensive and the last one run
    code, printed = suite(*workers, "--budget=10")
    assert code == 0, printed
    assert order_of(printed) == ["test_b.py", "test_a.py", "test_c.py"]
    assert "not started" not in printed
    code, printed = suite(*workers, "--budget=0", "--durations=3")
    assert code == 0, printed
    assert "4 skipped" in printed
    assert "4 tests not started: the --budget is spent" in printed
    assert "    2 of test_a.py" in printed
    code, printed = suite(*workers)  # skipped tests keep their durations
    assert order_of(printed)[0] == "test_c.py"


def test_tiers_are_measured_written_and_used(suite, tmp_path):
    """A test with a costly shared fixture is left out; cheap tests of its file are not."""
    (tmp_path / "tests").mkdir()
    table = tmp_path / "tests" / "expensive.tsv"
    burn = "\nimport time\ndef burn():\n    end = time.process_time() + 0.3\n"
    burn += "    while time.process_time() < end: pass\n"
    (tmp_path / "test_d.py").write_text(
        f"import pytest{burn}@pytest.fixture(scope='module')\ndef costly(): burn()\n"
        "def test_cheap(): pass\ndef test_shared(costly): pass\ndef test_costly(): burn()\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import tests.running\ntests.running.QUICK_CPU_SECONDS = 0.2\n"
    )
    workers = ("--numprocesses=2", "--dist=loadfile")
    code, printed = suite(*workers, "test_d.py", "test_a.py", "--write-tiers")
    assert code == 0, printed
    rows = [line.split("\t") for line in table.read_text().splitlines()]
    assert {row[1] for row in rows if len(row) == 2} == {
        "test_d.py::test_shared",
        "test_d.py::test_costly",
    }
    assert ["# quick", "3 tests", "0 CPU seconds"] in rows
    code, printed = suite(*workers, "-v", "--tier=quick")
    assert code == 0, printed
    assert "test_cheap" in printed
    assert "test_shared" not in printed
    assert "test_slow" not in printed
    code, printed = suite(*workers, "-v", "--tier=expensive")
    assert code == 0, printed
    assert "test_cheap" not in printed
    assert "test_shared" in printed
    assert "test_slow" in printed


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.floats(0.01, 9.0), min_size=1),
    st.dictionaries(st.sampled_from("xyz"), st.floats(0.01, 9.0)),
    st.data(),
    st.floats(0.0, 30.0),
)
def test_the_quick_tier_fits_its_budget(tests, fixtures, data, budget):
    names = st.lists(st.sampled_from(sorted(fixtures)), unique=True) if fixtures else st.just([])
    uses = {test: data.draw(names) for test in tests}
    chosen = choose_quick(tests, fixtures, uses, budget)
    paid = {name for test in chosen for name in uses[test]}
    spent = sum(tests[test] for test in chosen) + sum(fixtures[name] for name in paid)
    assert spent <= budget + 1e-6
    for test in set(tests) - chosen:
        assert spent + tests[test] + sum(fixtures[n] for n in {*uses[test]} - paid) > budget
