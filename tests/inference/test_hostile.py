"""Malformed input files: each is answered row by row or refused in one sentence."""

import pytest

from convbert_jax.config import UserError
from tests.inference.conftest import MODELS
from tests.inference.hostile_inputs import HOSTILE

NAMED = ("in.txt", "in.csv", "in.tsv", "in.jsonl", "in.json", "in.txt.gz", "in.conll")
# All models share the readers, so only one model reads every input.
OF_MODEL = {
    "one": tuple(HOSTILE),
    "pair": ("nothing", "bytes", "tab", "empty first", *(n for n in HOSTILE if n[:5] == "texts")),
    "number": ("json lists", "three tabs", "csv short", "texts blank"),
    "tags": ("one word", "combining", *(n for n in HOSTILE if n[:5] == "words")),
    "answers": tuple(n for n in HOSTILE if n.startswith(("question", "context"))),
}


@pytest.mark.parametrize("model", MODELS)
def test_hostile_inputs_are_answered_or_refused(predict, tmp_path, model):
    """Under each of seven file names: one answer per row, or one sentence and no output."""
    for name in OF_MODEL[model]:
        content = HOSTILE[name]
        content = content if isinstance(content, bytes) else content.encode()
        for file in NAMED:
            output = "out.tsv" if file == "in.csv" else "out.jsonl"
            try:
                found = predict(model, content, file, output)
            except UserError as error:
                said = str(error)
            else:
                said = ""
                if file == "in.txt":
                    lines = content.count(b"\n") + (not content.endswith(b"\n"))
                    assert len(found) == lines, name
                for line in found if output == "out.jsonl" else ():
                    assert ("error" in line) != ("prediction" in line), name
            assert (tmp_path / output).exists() == (not said), name
            assert len(said) < 1_000, name
            assert said[-1:] in (".", ""), name
            assert not (tmp_path / f"{output}.unfinished").exists(), name
