"""What nobody means to have predicted has an answer or is refused in a sentence."""

import pytest

from convbert_jax.config import UserError
from tests.inference.conftest import MODELS
from tests.inference.hostile_inputs import HOSTILE

NAMED = ("in.txt", "in.csv", "in.tsv", "in.jsonl", "in.json", "in.txt.gz", "in.conll")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("model", MODELS)
def test_hostile_inputs_are_answered_or_refused(predict, tmp_path, model, name):
    """Under seven names each: an answer for every row, or one sentence and no output."""
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
                assert len(found) == content.count(b"\n") + (not content.endswith(b"\n"))
            for line in found if output == "out.jsonl" else ():
                assert ("error" in line) != ("prediction" in line)
        assert (tmp_path / output).exists() == (not said)
        assert len(said) < 1_000
        assert said[-1:] in (".", "")
        assert not (tmp_path / f"{output}.unfinished").exists()
