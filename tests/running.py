"""Test order, tiers and budget: a pytest plugin registered by tests/conftest.py.

- `--tier=quick` leaves out the tests listed in tests/expensive.tsv and those marked `slow`;
  `--tier=expensive` runs only these.
  `--write-tiers` renews that file from the CPU seconds measured in the same run.
- xdist workers start with the most expensive files. The cost of a test is its last duration (in
  pytest's cache), or else a guess by its marker.
- The slowest files are printed with pytest's slowest tests (`--durations`).
- With CONVBERT_TEST_COMPLETE=1 a test skipped because of a missing package fails. Apache Beam and
  jax-privacy are exempt, because they cannot be installed with the versions of the lock files, and
  mteb and usearch, because the lock files do not have them.
- With `--budget=MINUTES` no test starts later than that. The least recently run files go first,
  so that a few runs cover all of them; the end of the run lists the remaining files.
"""

import collections
import importlib.util
import os
import pathlib
import time

import pytest

# Keys of pytest's cache: duration of each test, and its last run in seconds since 1970.
SECONDS, RUN_AT = "convbert_jax/seconds", "convbert_jax/run_at"
# Assumed seconds of a test that was never run, by marker.
EXPECTED = {"slow": 20.0, "tpu_compile": 10.0, "parity": 1.0}
EXPECTED_ELSE = 0.2
SHOWN = 10
LACKS = "could not import"  # message of pytest.importorskip
NO_BEAM = "needs Apache Beam, which conflicts with the lock files: see docs/howto/beam.md"
NO_PRIVACY = "needs jax-privacy, which conflicts with the lock files: see docs/howto/privacy.md"
NO_MTEB = "needs mteb, which is not in the lock files: pip install '.[mteb]'"
NO_USEARCH = "needs usearch, which is not in the lock files: pip install '.[usearch]'"
NO_TIME = "not started: the --budget is spent"
# Tests excluded from the quick tier, with their CPU seconds, and the totals.
EXPENSIVE = pathlib.PurePath("tests", "expensive.tsv")
# End-to-end commands, in the quick tier at any cost.
ALWAYS_QUICK = "tests/end_to_end/test_paths.py"
# CPU seconds of the tests in the quick tier, without process startup and collection.
QUICK_CPU_SECONDS = 700.0

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason=f"{LACKS} 'libtpu'"
)


class Running:
    """Order, tiers and budget of a run; `_seconds` holds durations in the reporting process."""

    def __init__(self, config: pytest.Config):
        self._cache = getattr(config, "cache", None)
        self._complete = os.environ.get("CONVBERT_TEST_COMPLETE", "") not in ("", "0")
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._left_out: list[str] = []
        minutes = config.getoption("budget")
        shared = {  # sent to the workers, which must use the same order
            "seconds": self._recorded(SECONDS),
            "run_at": self._recorded(RUN_AT) if minutes is not None else {},
            "deadline": float("inf") if minutes is None else time.time() + 60 * minutes,
        }
        self._shared = getattr(config, "workerinput", {}).get("running", shared)

    def _recorded(self, name: str) -> dict[str, float]:
        return self._cache.get(name, {}) if self._cache else {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        node.workerinput["running"] = self._shared

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        tier = config.getoption("tier")
        if tier != "all":
            expensive = read_expensive(config.rootpath / EXPENSIVE)
            tiers = {"quick": [], "expensive": []}
            for item in items:
                costly = item.nodeid in expensive or item.get_closest_marker("slow")
                tiers["expensive" if costly else "quick"].append(item)
            items[:] = tiers.pop(tier)
            config.hook.pytest_deselected(items=next(iter(tiers.values())))
        if hasattr(config, "workerinput"):
            sort_by_cost(items, self._shared["seconds"])
            sort_by_age(items, self._shared["run_at"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        if time.time() > self._shared["deadline"]:
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
                self._seconds.pop(test, None)  # teardown of a test that never started
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


class Costs:
    """Measures the CPU seconds of tests and, separately, of shared fixtures."""

    def __init__(self):
        self._mark = cpu_seconds()
        self._fixtures: list[tuple[str, float]] = []  # set up in the current phase of a test
        self._nested: list[float] = []
        self.tests: dict[str, float] = collections.defaultdict(float)
        self.fixtures: dict[str, float] = {}
        self.users: dict[str, list[str]] = {}  # test -> shared fixtures that it may use

    def pytest_runtest_logstart(self):
        self._mark = cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        start = cpu_seconds()
        self._nested.append(0.0)
        try:
            return (yield)
        finally:
            spent = cpu_seconds() - start
            own = spent - self._nested.pop()
            if self._nested:
                self._nested[-1] += spent
            index = getattr(request, "param_index", 0)
            name = f"{_file(request.node.nodeid)}::{fixturedef.argname}[{index}]"
            self._fixtures.append((name, own))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        now = cpu_seconds()
        report.cpu = {
            "own": now - self._mark - sum(seconds for _, seconds in self._fixtures),
            "fixtures": self._fixtures,
            "uses": shared_fixtures(item),
        }
        self._mark, self._fixtures = now, []
        return report

    def pytest_runtest_logreport(self, report):
        if not hasattr(report, "cpu"):  # reported by a crashed worker
            return
        self.tests[report.nodeid] += report.cpu["own"]
        self.users[report.nodeid] = report.cpu["uses"]
        for name, seconds in report.cpu["fixtures"]:
            self.fixtures[name] = max(seconds, self.fixtures.get(name, 0.0))

    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):
            uses = {
                test: [name for name in names if name in self.fixtures]
                for test, names in self.users.items()
            }
            path = session.config.rootpath / EXPENSIVE
            write_expensive(path, self.tests, self.fixtures, uses, QUICK_CPU_SECONDS)


def pytest_addoption(parser):
    parser.addoption(
        "--budget",
        type=float,
        metavar="MINUTES",
        help="start no test later than that; those first that were not run for longest",
    )
    parser.addoption(
        "--tier",
        choices=["quick", "expensive", "all"],
        default="all",
        help="expensive: the tests of tests/expensive.tsv and those marked slow; quick: all others",
    )
    parser.addoption(
        "--write-tiers",
        action="store_true",
        help="measure CPU seconds and renew tests/expensive.tsv; use it with the whole suite",
    )


def pytest_configure(config):
    config.pluginmanager.register(Running(config), "convbert_jax_running")
    if config.getoption("write_tiers"):
        config.pluginmanager.register(Costs(), "convbert_jax_costs")


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and the children that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def shared_fixtures(item: pytest.Item) -> list[str]:
    """Returns the names under which `Costs` may have measured a test's fixtures."""
    indices = getattr(getattr(item, "callspec", None), "indices", {})
    return [
        f"{place}::{name}[{indices.get(name, 0)}]"
        for place in (_file(item.nodeid), "")  # file scope, session scope
        for name in item.fixturenames
    ]


def choose_quick(
    tests: dict[str, float],
    fixtures: dict[str, float],
    uses: dict[str, list[str]],
    budget: float,
) -> set[str]:
    """Chooses `ALWAYS_QUICK` and the cheapest tests that fit a budget with their shared fixtures.

    Args:
        tests: CPU seconds of each test without shared fixtures.
        fixtures: CPU seconds of each shared fixture.
        uses: test -> required shared fixtures.
        budget: CPU seconds of the chosen tests plus each required fixture, counted once.
    """
    sharers = collections.Counter(name for names in uses.values() for name in names)

    def rank(test: str) -> tuple:
        amortized = tests[test] + sum(fixtures[name] / sharers[name] for name in uses[test])
        return not test.startswith(ALWAYS_QUICK), amortized, test

    chosen: set[str] = set()
    paid: set[str] = set()
    spent = 0.0
    for test in sorted(tests, key=rank):
        new = {*uses[test]} - paid
        cost = tests[test] + sum(fixtures[name] for name in new)
        if spent + cost <= budget:
            chosen.add(test)
            paid |= new
            spent += cost
    return chosen


def write_expensive(path, tests, fixtures, uses, budget) -> None:
    """Writes the tests excluded from the quick tier; arguments as for `choose_quick`."""
    chosen = choose_quick(tests, fixtures, uses, budget)
    paid = {name for test in chosen for name in uses[test]}
    quick = sum(tests[test] for test in chosen) + sum(fixtures[name] for name in paid)
    total = sum(tests.values()) + sum(fixtures.values())
    left_out = sorted(set(tests) - chosen)
    lines = [
        "# Tests that launch/test.sh leaves out, with their CPU seconds without shared fixtures.",
        "# Renewed by: bash launch/test.sh --all --write-tiers",
        f"# quick\t{len(chosen)} tests\t{quick:.0f} CPU seconds",
        f"# all\t{len(tests)} tests\t{total:.0f} CPU seconds",
        *(f"{tests[test]:.1f}\t{test}" for test in left_out),
    ]
    path.write_text("\n".join(lines) + "\n")


def read_expensive(path: pathlib.Path) -> set[str]:
    lines = path.read_text().splitlines()
    return {line.partition("\t")[2] for line in lines if not line.startswith("#")}


def _file(test: str) -> str:
    return test.partition("::")[0]


def expected_seconds(item: pytest.Item) -> float:
    """Returns the guessed duration of a test that was never run."""
    marked = (seconds for marker, seconds in EXPECTED.items() if item.get_closest_marker(marker))
    return max(marked, default=EXPECTED_ELSE)


def sort_by_cost(items: list[pytest.Item], recorded: dict[str, float]) -> None:
    """Puts the most expensive files first; the tests of a file keep their order."""
    cost = collections.Counter()
    for item in items:
        cost[_file(item.nodeid)] += recorded.get(item.nodeid, expected_seconds(item))
    items.sort(key=lambda item: (-cost[_file(item.nodeid)], _file(item.nodeid)))


def sort_by_age(items: list[pytest.Item], run_at: dict[str, float]) -> None:
    """Sorts files by the last run of their oldest test; tests that were never run go first."""
    oldest = collections.defaultdict(lambda: float("inf"))
    for item in items:
        file = _file(item.nodeid)
        oldest[file] = min(oldest[file], run_at.get(item.nodeid, 0.0))
    items.sort(key=lambda item: oldest[_file(item.nodeid)])
