"""How the suite runs, as a plugin of pytest that tests/conftest.py names.

- Workers of xdist get the dearest files first, so that none is left with a long one at the end.
  What a test costs is what it took last time (in pytest's cache), else what its marker lets expect.
- The slowest files are printed with pytest's own slowest tests (--durations).
- With CONVBERT_TEST_COMPLETE=1 a test that lacks a package is an error and not skipped.
"""

import collections
import importlib.util
import os

import pytest

RECORD = "convbert_jax/seconds"  # of pytest's cache: {test: seconds}
# Seconds of a test that has not been run here, by its marker; most of the others take less.
EXPECTED = {"slow": 20.0, "tpu_compile": 10.0, "parity": 1.0}
EXPECTED_ELSE = 0.2
SHOWN = 10
LACKS = "could not import"  # as pytest.importorskip says it

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason=f"{LACKS} 'libtpu'"
)


class Running:
    """The hooks; `seconds` are what tests took in this run, in the process that reports."""

    def __init__(self, config: pytest.Config):
        self._cache = getattr(config, "cache", None)
        self._complete = os.environ.get("CONVBERT_TEST_COMPLETE", "") not in ("", "0")
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def _recorded(self) -> dict[str, float]:
        return self._cache.get(RECORD, {}) if self._cache else {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Workers must agree on one order: all get the record as it is now."""
        node.workerinput["seconds"] = self._recorded()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        if hasattr(config, "workerinput"):
            sort_by_cost(items, config.workerinput["seconds"])

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
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session):
        if self._cache and not hasattr(session.config, "workerinput"):
            self._cache.set(RECORD, self._recorded() | self._seconds)

    def pytest_terminal_summary(self, terminalreporter, config):
        if not config.getoption("durations"):
            return
        files, tests = collections.Counter(), collections.Counter()
        for name, seconds in self._seconds.items():
            files[_file(name)] += seconds
            tests[_file(name)] += 1
        terminalreporter.section(f"slowest {SHOWN} files")
        for name, seconds in files.most_common(SHOWN):
            terminalreporter.write_line(f"{seconds:8.2f}s {tests[name]:5d} tests  {name}")


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
