"""How the suite runs, as a plugin of pytest that tests/conftest.py names.

- Workers of xdist get the dearest files first, so that none is left with a long one at the end.
  What a test costs is what it took last time (in pytest's cache), else what its marker lets expect.
- The slowest files are printed with pytest's own slowest tests (--durations).
- With CONVBERT_TEST_COMPLETE=1 a test that lacks a package is an error and not skipped; but for
  Apache Beam, which cannot be installed with the versions of the lock files.
- With --budget=MINUTES no test begins later than that. Files that were not run for longest go
  first, so that a few runs see all; what was left out is said at the end.
"""

import collections
import importlib.util
import os
import time

import pytest

# Of pytest's cache: what a test took, and when it was run last (seconds since 1970).
SECONDS, RUN_AT = "convbert_jax/seconds", "convbert_jax/run_at"
# Seconds of a test that has not been run here, by its marker; most of the others take less.
EXPECTED = {"slow": 20.0, "tpu_compile": 10.0, "parity": 1.0}
EXPECTED_ELSE = 0.2
SHOWN = 10
LACKS = "could not import"  # as pytest.importorskip says it
# Of Apache Beam, and it is no error: an environment of its own has what it needs.
NO_BEAM = "needs Apache Beam, which does not go with the lock files: see docs/pretraining.md"
NO_TIME = "not begun: the --budget is spent"

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason=f"{LACKS} 'libtpu'"
)


class Running:
    """The hooks; `seconds` are what tests took in this run, in the process that reports."""

    def __init__(self, config: pytest.Config):
        self._cache = getattr(config, "cache", None)
        self._complete = os.environ.get("CONVBERT_TEST_COMPLETE", "") not in ("", "0")
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._left_out: list[str] = []
        minutes = config.getoption("budget")
        told = {  # what workers are told by the process that starts them; they must agree
            "seconds": self._recorded(SECONDS),
            "run_at": self._recorded(RUN_AT) if minutes is not None else {},
            "deadline": float("inf") if minutes is None else time.time() + 60 * minutes,
        }
        self._told = getattr(config, "workerinput", {}).get("running", told)

    def _recorded(self, name: str) -> dict[str, float]:
        return self._cache.get(name, {}) if self._cache else {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["running"] = self._told

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        if hasattr(config, "workerinput"):
            sort_by_cost(items, self._told["seconds"])
            sort_by_age(items, self._told["run_at"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.time() > self._told["deadline"]:
            pytest.skip(NO_TIME)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        return self._no_skip((yield))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        return self._no_skip((yield))

    def _no_skip(self, report):
        if self._complete and report.skipped and LACKS in str(report.longrepr):
            report.outcome = "failed"
            report.longrepr = f"{report.longrepr[2]}; skipped, which is an error here"
        return report

    def pytest_runtest_logreport(self, report):
        if report.skipped and NO_TIME in str(report.longrepr):
            self._left_out.append(report.nodeid)
        else:
            self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session):
        if self._cache and not hasattr(session.config, "workerinput"):
            for test in self._left_out:
                self._seconds.pop(test, None)  # the teardown of a test that never began
            now = dict.fromkeys(self._seconds, time.time())
            self._cache.set(SECONDS, self._recorded(SECONDS) | self._seconds)
            self._cache.set(RUN_AT, self._recorded(RUN_AT) | now)

    def pytest_terminal_summary(self, terminalreporter, config):
        if self._left_out:
            files = collections.Counter(map(_file, self._left_out))
            terminalreporter.section(f"{len(self._left_out)} tests {NO_TIME}")
            for name, tests in sorted(files.items()):
                terminalreporter.write_line(f"{tests:5d} of {name}")
        if not config.getoption("durations"):
            return
        files, tests = collections.Counter(), collections.Counter()
        for name, seconds in self._seconds.items():
            files[_file(name)] += seconds
            tests[_file(name)] += 1
        terminalreporter.section(f"slowest {SHOWN} files")
        for name, seconds in files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.2f}s {tests[name]:5d} tests  {name}")


def pytest_addoption(parser):
    parser.addoption(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="no test begins later than that; first those that were not run for longest",
    )


def pytest_configure(config):
    config.pluginmanager.register(Running(config), "convbert_jax_running")


def _file(test: str) -> str:
    return test.partition("::")[0]


def expected_seconds(item: pytest.Item) -> float:
    """What a test that was never run may take."""
    marked = (seconds for marker, seconds in EXPECTED.items() if item.get_closest_marker(marker))
    return max(marked, default=EXPECTED_ELSE)


def sort_by_cost(items: list[pytest.Item], recorded: dict[str, float]) -> None:
    """Puts the files with the dearest tests first; tests of one file stay in their order."""
    cost = collections.Counter()
    for item in items:
        cost[_file(item.nodeid)] += recorded.get(item.nodeid, expected_seconds(item))
    items.sort(key=lambda item: (-cost[_file(item.nodeid)], _file(item.nodeid)))


def sort_by_age(items: list[pytest.Item], run_at: dict[str, float]) -> None:
    """Puts the files first whose least recently run test is oldest, or was never run."""
    oldest = collections.defaultdict(lambda: float("inf"))
    for item in items:
        file = _file(item.nodeid)
        oldest[file] = min(oldest[file], run_at.get(item.nodeid, 0.0))
    items.sort(key=lambda item: oldest[_file(item.nodeid)])
