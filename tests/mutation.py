"""Measures how many small faults in the package the tests detect.

    pip install pytest-cov
    python -m tests.mutation cover FOLDER [--tier=quick]  records which test executes which line
    python -m tests.mutation run FOLDER [--tier=quick]    tries 120 mutants; resumable
    python -m tests.mutation report FOLDER

A mutant has one faulty expression. The tests that execute its line run, cheapest first, until one
fails, for three minutes at most. FOLDER holds the coverage data, the mutants and a results file
for each tier.

To compare the tests of two commits, run both steps in a checkout of each. Pass the mutants of the
first to the second `run` with `--mutants=FOLDER/mutants.jsonl`. Mutants are found by file and
source line; lines that differ between the commits are excluded from the comparison ("absent").
"""

import argparse
import ast
import collections
import copy
import itertools
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.running import EXPENSIVE, read_expensive

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
PARTS = [
    *("ops", "objectives", "models", "data", "training/checkpoints.py", "interop", "inference"),
]
MUTANTS, SEED, LIMIT_SECONDS = 120, 0, 180.0
SWAPS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv},
}


class Mutant(NamedTuple):
    """A fault that replaces the expression `old` by `new`; `start` and `end` are byte offsets.

    `text` is the line without indentation and comment; `number` counts equal mutants of equal
    lines of a file.
    """

    path: str
    line: int
    start: int
    end: int
    old: str
    new: str
    text: str
    number: int

    def key(self) -> tuple:
        """Identifies the mutant in other commits, where line numbers differ."""
        return self.path, self.text, self.old, self.new, self.number


def mutated(node: ast.expr) -> ast.expr | None:
    """Returns a faulty copy of an expression, or None."""
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1 and type(new.ops[0]) in SWAPS:
        new.ops[0] = SWAPS[type(new.ops[0])]()
    elif isinstance(new, ast.BinOp | ast.BoolOp) and type(new.op) in SWAPS:
        new.op = SWAPS[type(new.op)]()
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        return new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool):
        new.value = not new.value
    elif isinstance(new, ast.Constant) and isinstance(new.value, int | float):
        new.value += 1
    else:
        return None
    return new


def mutants_of(path: pathlib.Path) -> Iterator[Mutant]:
    """Yields all mutants of a file, except in annotations, docstrings and messages."""
    source = path.read_text(encoding="utf-8")
    lines = source.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    seen: collections.Counter = collections.Counter()
    nodes: collections.deque[ast.AST] = collections.deque([ast.parse(source)])
    while nodes:
        node = nodes.popleft()
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        annotations = {getattr(node, "annotation", None), getattr(node, "returns", None)}
        nodes.extend(child for child in ast.iter_child_nodes(node) if child not in annotations)
        new = mutated(node) if isinstance(node, ast.expr) else None
        if new is not None:
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            name = path.relative_to(REPOSITORY).as_posix()
            old, text = (
                ast.unparse(node),
                lines[node.lineno - 1].decode().partition("  #")[0].strip(),
            )
            found = Mutant(name, node.lineno, start, end, old, f"({ast.unparse(new)})", text, 0)
            yield found._replace(number=seen[found._replace(line=0, start=0, end=0)])
            seen[found._replace(line=0, start=0, end=0)] += 1


def draw(covered: dict[str, dict[int, list[str]]]) -> list[Mutant]:
    """Draws MUTANTS among the executed lines, the same number from each of PARTS."""
    chosen, generator = [], random.Random(SEED)
    for number, part in enumerate(PARTS):
        place = REPOSITORY / "convbert_jax" / part
        found = [
            mutant
            for path in ([place] if place.is_file() else sorted(place.rglob("*.py")))
            for mutant in mutants_of(path)
            if covered.get(mutant.path, {}).get(mutant.line)
        ]
        count = MUTANTS * (number + 1) // len(PARTS) - MUTANTS * number // len(PARTS)
        chosen += generator.sample(found, count)
    return chosen


def cover(folder: pathlib.Path, tier: str) -> None:
    """Runs a tier with coverage; records outcomes, seconds and the lines each test executes."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "--numprocesses=2", "--dist=loadfile", "-q"]
    command += ["--cov=convbert_jax", "--cov-context=test", "--cov-report="]
    command += [f"--tier={tier}", "-m", "not gpu and not tpu"]
    command += ["-o", f"cache_dir={folder / 'cache'}"]
    subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "COVERAGE_FILE": str(folder / "coverage")},
        check=False,
    )


def covered_lines(folder: pathlib.Path) -> dict[str, dict[int, list[str]]]:
    """Returns file -> line -> tests that execute it."""
    import coverage

    data = coverage.CoverageData(str(folder / "coverage"))
    data.read()
    return {
        pathlib.Path(path).relative_to(REPOSITORY).as_posix(): {
            line: sorted({context.partition("|")[0] for context in contexts if context})
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        for path in data.measured_files()
    }


def passing_tests(folder: pathlib.Path) -> dict[str, float]:
    """Returns the tests that pass without a mutant, and their seconds."""
    cache = folder / "cache" / "v"
    seconds = json.loads((cache / "convbert_jax" / "seconds").read_text())
    failed = cache / "cache" / "lastfailed"
    for test in json.loads(failed.read_text()) if failed.exists() else ():
        seconds.pop(test, None)
    return seconds


def try_mutant(mutant: Mutant, tests: list[str], folder: pathlib.Path) -> tuple[str, float]:
    """Returns "killed", "survived" or "time" (not all tests ran), and seconds."""
    with tempfile.TemporaryDirectory() as place:
        checkout = pathlib.Path(place, "checkout")
        shutil.copytree(
            REPOSITORY, checkout, ignore=shutil.ignore_patterns(".git", ".*cache", ".venv*")
        )
        file = checkout / mutant.path
        source = file.read_bytes()
        file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.end :])
        names = pathlib.Path(place, "tests.txt")
        names.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", f"@{names}"]
        command += ["-o", f"cache_dir={folder / 'programs'}"]
        begin = time.monotonic()
        try:
            result = subprocess.run(
                command,
                cwd=checkout,
                env={**os.environ, "PYTHONPATH": str(checkout)},
                capture_output=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
            # The names are from the same checkout, so a collection error is the mutant's.
            outcome = "killed" if result.returncode else "survived"
        except subprocess.TimeoutExpired:
            outcome = "time"
        return outcome, time.monotonic() - begin


def read_mutants(path: pathlib.Path) -> list[Mutant | None]:
    """Returns the mutants of another checkout; None where the line does not exist here."""
    written = [Mutant(**json.loads(line)) for line in path.read_text().splitlines()]
    here = {
        mutant.key(): mutant
        for name in sorted({mutant.path for mutant in written})
        if (REPOSITORY / name).exists()
        for mutant in mutants_of(REPOSITORY / name)
    }
    return [here.get(mutant.key()) for mutant in written]


def run(folder: pathlib.Path, tier: str, written: pathlib.Path | None) -> None:
    """Tries the mutants without a result in the folder; prints each.

    Args:
      written: mutants.jsonl of another checkout; None: draws mutants and writes that file.
    """
    covered = covered_lines(folder)
    seconds = passing_tests(folder)
    expensive = read_expensive(REPOSITORY / EXPENSIVE) if tier == "quick" else set()
    results = folder / f"results-{tier}.jsonl"
    done = len(results.read_text().splitlines()) if results.exists() else 0
    if written:
        mutants = read_mutants(written)
    else:
        mutants = draw(covered)
        lines = [json.dumps(mutant._asdict()) + "\n" for mutant in mutants]
        (folder / "mutants.jsonl").write_text("".join(lines))
    for number, mutant in enumerate(mutants):
        if number < done:
            continue
        if mutant is None:
            with results.open("a") as file:
                file.write(json.dumps({"outcome": "absent"}) + "\n")
            continue
        lines = covered.get(mutant.path, {})
        tests = sorted({*lines.get(mutant.line, ())} & {*seconds} - expensive)
        tests.sort(key=seconds.__getitem__)
        outcome, spent = try_mutant(mutant, tests, folder) if tests else ("survived", 0.0)
        row = {**mutant._asdict(), "outcome": outcome, "seconds": round(spent, 1)}
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number + 1}/{MUTANTS} {outcome} {mutant.path}:{mutant.line} {mutant.new}")


def report(folder: pathlib.Path) -> None:
    """Prints how many mutants each tier killed, and which survived."""
    for path in sorted(folder.glob("results-*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        counts = collections.Counter(row["outcome"] for row in rows)
        print(f"{path.stem}: {len(rows)} mutants, {dict(counts)}")
        for row in rows:
            if row["outcome"] in ("survived", "time"):
                print(f"  {row['path']}:{row['line']} {row['old']} -> {row['new']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("step", choices=["cover", "run", "report"])
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--tier", choices=["quick", "all"], default="all")
    parser.add_argument("--mutants", type=pathlib.Path, help="mutants.jsonl of another checkout")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if arguments.step == "cover":
        cover(folder, arguments.tier)
    elif arguments.step == "run":
        run(folder, arguments.tier, arguments.mutants)
    else:
        report(folder)


if __name__ == "__main__":
    main()
