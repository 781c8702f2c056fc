"""Prints every message of the package as one Markdown page: errors, warnings, log lines, help.

    python launch/messages.py > messages.md

It reads the source, so that each message stands once, with its place. `{...}` is a value.
"""

import ast
import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = (
    ("-m", "convbert_jax.main", "--help"),
    ("-m", "convbert_jax.demo", "--help"),
    ("launch/sweep.py", "--help"),
)
LEAST_WORDS = 4  # shorter strings are names, patterns and parts of tables


def messages(path: pathlib.Path) -> list[tuple[int, str, str]]:
    """Returns (line, kind, text) of the messages in a file; kind names the error or log call."""
    found: list[tuple[int, str, str]] = []

    def visit(node: ast.AST, kind: str) -> None:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logging."):
            kind = ast.unparse(node.func)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring
        text = _text(node)
        if text is not None:
            if len(text.split()) >= LEAST_WORDS:
                found.append((node.lineno, kind, " ".join(text.split())))
            return
        annotations = {getattr(node, "annotation", None), getattr(node, "returns", None)}
        for child in ast.iter_child_nodes(node):
            if child not in annotations:
                visit(child, kind)

    visit(ast.parse(path.read_text(encoding="utf-8")), "text")
    return found


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (_text(part) for part in node.values)
        return "".join("{...}" if part is None else part for part in parts)
    return None


def main() -> None:
    for path in sorted((REPOSITORY / "convbert_jax").rglob("*.py")):
        if found := messages(path):
            print(f"\n## {path.relative_to(REPOSITORY)}\n")
            for line, kind, text in found:
                print(f"- line {line}, {kind}: {text}")
    for command in COMMANDS:
        result = subprocess.run(
            [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, check=True
        )
        print(f"\n## python {' '.join(command)}\n\n```\n{result.stdout}```")


if __name__ == "__main__":
    main()
