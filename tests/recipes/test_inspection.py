"""--mode=inspect, from the model to the files, on random weights; the command line of it."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis.inside import maps
from convbert_jax.config import StageSection, UserError
from convbert_jax.interop import conversion, sources
from convbert_jax.models.build import build
from convbert_jax.models.pretraining import MaskedLanguageModel
from convbert_jax.workdir import Workdir
from tests.interop.conftest import make_run  # noqa: F401
from tests.pictures import shows_something

TEXTS = ["the river stone of light", "over the great house fire", "a stone house under the moon",
         "stone", "light over light under light and so on and on and on and on"]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(make_run):  # noqa: F811
    folder, _ = make_run(recipe="masked_lm", embedding_size=32)
    return str(folder)


@pytest.fixture(scope="module")
def exported(make_run, tmp_path_factory):  # noqa: F811
    """Attention alone, as Hugging Face has it."""
    run, _ = make_run(mixer="attention", recipe="masked_lm", embedding_size=32)
    return str(conversion.export(run, output=tmp_path_factory.mktemp("bert") / "bert"))


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join([*TEXTS, "", " "]))
    return str(file)


def read_table(file):
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def test_numbers_are_those_of_the_model_text_by_text(mixed, lines, tmp_path):
    """Against one text at a time, without padding."""
    result = recipes.inspect(mixed, texts=lines, word="Stone", output=str(tmp_path / "out"))
    model = convbert_jax.load(mixed)
    graphdef, _ = build(MaskedLanguageModel, model.config)
    _, params = sources.read_params(Workdir(mixed), model.config)

    @jax.jit
    def run(row):
        ones = jnp.ones_like(row)
        encode = nnx.merge(graphdef, params).encode
        return encode(row, ones, 0 * ones, capture=("attention", "filters"))[1][0]

    lengths, shares, filters = [], [], []
    for text in TEXTS:
        pieces = model.tokenize(text)
        ids = [model.tokenizer.entries.index(piece) for piece in pieces]
        seen = jax.device_get(run(jnp.asarray([ids])))
        lengths.append(len(ids))
        shares.append(maps.concentration(seen["attention"][:, 0]))
        if "stone" in text:
            filters.append(seen["filters"][:, 0, pieces.index("st")])  # then "on", "e"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    assert numbers["tokens"] == sum(lengths)
    np.testing.assert_allclose(
        list(numbers["concentration"].values()),
        np.average(shares, axis=0, weights=lengths),
        atol=1e-5,
    )
    chances = [maps.chance(n) for n in lengths]
    assert numbers["chance"] == pytest.approx(np.average(chances, weights=lengths))
    assert numbers["occurrences"] == len(filters) == 3
    table = read_table(result.folder / "filters.csv")
    assert len(table) == 3 * 2 * 2  # occurrences, layers, heads
    for line in table:
        number = [0, 2, 3].index(int(line["text"]))
        taps = [float(line[f"tap {i}"]) for i in range(9)]
        wanted = filters[number][int(line["layer"]), int(line["head"])]
        np.testing.assert_allclose(taps, wanted, atol=1e-5)


def test_two_models_side_by_side(mixed, exported, lines, tmp_path):
    result = recipes.inspect(
        mixed, beside=exported, texts=lines, word="stone", output=str(tmp_path / "out")
    )
    names = {file.name for file in result.folder.iterdir()}
    assert names == {
        *("attention.png", "attention-beside.png", "concentration.png", "filters.png"),
        *("concentration.csv", "filters.csv", "maps.npz", "numbers.json"),
    }
    for name in names:
        assert not name.endswith(".png") or shows_something(result.folder / name)
    ours, theirs = json.loads((result.folder / "numbers.json").read_text())
    assert not ours["shows_nothing"]
    assert theirs["shows_nothing"] == ["layers 0 to 1 have no filters of a word (4 of 8)."]
    heads = read_table(result.folder / "concentration.csv")
    assert len(heads) == 2 * 2 + 2 * 4
    assert theirs["shows_nothing"][0] in result.report
    with np.load(result.folder / "maps.npz") as arrays:
        assert arrays["layer-1"].shape[0] == 2
        assert arrays["layer-1-beside"].shape[0] == 4


def test_what_a_layer_cannot_show_is_said(make_run, lines, tmp_path):  # noqa: F811
    stages = tuple(
        StageSection(layers=1, mixer=mixer) for mixer in ("light", "dilated", "attention")
    )
    run, _ = make_run(layers=3, stages=stages, generator={"kind": "uniform"})
    result = recipes.inspect(str(run), texts=lines, word="stone")
    assert result.folder == run / "inside" / "step-3"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    light, dilated, attention = numbers["shows_nothing"]
    assert light.startswith("layer 0 has no attention maps (4 of lightweight convolution")
    assert dilated.startswith("layer 1 has no attention maps and no filters of a word (conv")
    assert attention.startswith("layer 2 has no filters of a word (4 of 8)")
    assert list(numbers["concentration"]) == ["2"]
    # The same filters at all positions: no context moves them.
    np.testing.assert_allclose(numbers["moved_by_context"]["0"], 0, atol=1e-6)
    result = recipes.inspect(str(run), texts=lines)
    assert "layer 0 has no attention maps, but filters of a word, with --word=WORD (4" in (
        result.report
    )
    with pytest.raises(UserError, match="--layers=1,2: none of these has filters; choose from 0"):
        recipes.inspect(str(run), texts=lines, word="stone", layers=(1, 2))
    with pytest.raises(UserError, match=r"--layers=3: .* has layers 0 to 2"):
        recipes.inspect(str(run), texts=lines, word="stone", layers=(3,))


def test_held_out_texts_of_the_run_are_the_default(pretrained):
    result = recipes.inspect(str(pretrained.folder))
    assert result.folder == pretrained.folder / "inside" / "step-4"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    assert 4 < numbers["texts"] <= 64
    assert numbers["tokens"] > 10 * numbers["texts"]
    # a model that has hardly learned attends everywhere alike
    (heads,) = numbers["concentration"].values()
    np.testing.assert_allclose(heads, numbers["chance"], atol=0.02)
    with pytest.raises(UserError, match="--word=the: layer 0 has no filters of a word"):
        recipes.inspect(str(pretrained.folder), word="the")
    with pytest.raises(UserError, match="--word=xylophone stands in none of the held-out texts"):
        recipes.inspect(str(pretrained.folder), word="xylophone")


def test_nothing_to_see_is_one_sentence(make_run, mixed, exported, lines, tmp_path):  # noqa: F811
    def refused(says, *arguments, **named):
        with pytest.raises(UserError, match=says) as error:
            recipes.inspect(*arguments, **named)
        assert "\n" not in str(error.value)

    run, _ = make_run(mixer="separable", generator={"kind": "uniform"})
    refused("shows nothing: layers 0 to 1 have no attention maps", str(run), texts=lines)
    refused("--word=boat stands in none of the 5 texts", mixed, texts=lines, word="boat")
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    refused("empty.txt has no text; write one a line", mixed, texts=str(empty))
    refused("nowhere.txt cannot be read", mixed, texts=str(tmp_path / "nowhere.txt"))
    refused("--output=.*empty.txt is a file", mixed, texts=lines, output=str(empty))
    output = str(tmp_path / "out")
    refused("is no run of ours to write into; add --output=FOLDER", exported, texts=lines)
    refused("has no held-out texts of its own; .*--input=FILE", exported, output=output)
    refused("nothing", str(tmp_path / "nothing"), texts=lines, output=output)
