"""Prints every error, warning, log line and help text of the package as one Markdown page.

    python launch/messages.py > messages.md

Messages are read from the source, each with its file and line. `{...}` is a value.
"""

import ast
import pathlib
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = (
    ("-m", "convbert_jax.main", "--help"),
    ("-m", "convbert_jax.serve", "--help"),
    ("launch/sweep.py", "--help"),
)
LEAST_WORDS = 4  # shorter strings are names, patterns and parts of tables


def messages(path: pathlib.Path) -> list[tuple[int, str, str]]:
    """Returns (line, kind, text) of the messages in a file; kind names the error or log call."""
    found: list[tuple[int, str, str]] = []

    def visit(node: ast.AST, kind: str) -> None:
        match node:
            case ast.Expr(value=ast.Constant()):
                return  # a docstring
            case ast.Raise(exc=ast.Call(func=function)):
                kind = ast.unparse(function)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logging")) as function):
                kind = ast.unparse(function)
            case ast.Constant(value=str()) | ast.JoinedStr():
                parts = getattr(node, "values", [node])
                text = "".join(
                    part.value if isinstance(part, ast.Constant) else "{...}" for part in parts
                )
                if len(words := text.split()) >= LEAST_WORDS:
                    found.append((node.lineno, kind, " ".join(words)))
                return
        annotations = {getattr(node, "annotation", None), getattr(node, "returns", None)}
        for child in ast.iter_child_nodes(node):
            if child not in annotations:
                visit(child, kind)

    visit(ast.parse(path.read_text(encoding="utf-8")), "text")
    return found


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
