"""Mutants of tests/mutation.py are valid programs that differ from the original."""

import ast
import json

from tests import mutation

SOURCE = '''"""A docstring."""
LIMIT: int = 3


def f(a, b=True):
    if not a < LIMIT and b:
        raise ValueError(f"{a + 1} is too large" + "")
    return (a +
            b)
'''


def test_each_mutant_is_another_program(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    mutants = list(mutation.mutants_of(path))
    assert {(mutant.line, mutant.new) for mutant in mutants} == {
        *((2, "(4)"), (5, "(False)"), (6, "(not a < LIMIT or b)"), (6, "(a < LIMIT)")),
        *((6, "(a <= LIMIT)"), (8, "(a - b)")),
    }
    before = ast.dump(ast.parse(SOURCE))
    for mutant in mutants:
        source = SOURCE.encode()
        after = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(after)) != before


def test_mutants_are_found_where_lines_have_moved(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation, "REPOSITORY", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    mutants = list(mutation.mutants_of(path))
    written = tmp_path / "mutants.jsonl"
    written.write_text("".join(json.dumps(mutant._asdict()) + "\n" for mutant in mutants))
    path.write_text("# moved\n" + SOURCE.replace("= 3", "= 30").replace(":\n", ":  # why\n"))
    found = mutation.read_mutants(written)
    assert found[0] is None  # LIMIT has another value
    assert [mutant.line for mutant in found[1:]] == [mutant.line + 1 for mutant in mutants[1:]]
