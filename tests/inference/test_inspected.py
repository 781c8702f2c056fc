"""--mode=inspect on a fine-tuned model."""

import json

from convbert_jax import recipes
from convbert_jax.config import UserError
from tests.refusals import refused


def test_a_fine_tuned_model_is_looked_into(models, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("the sun over the moon\nfire under water\n")
    folder, output = str(models["one"]), str(tmp_path / "out")
    result = recipes.inspect(folder, texts=str(texts), output=output)
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    assert numbers["texts"] == 2
    assert numbers["concentration"]
    with refused(UserError, folder):
        recipes.inspect(folder, output=output)
