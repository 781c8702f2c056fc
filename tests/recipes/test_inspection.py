"""--mode=inspect on models with random weights: reports, files and errors."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis import inspection
from convbert_jax.config import StageSection, UserError
from convbert_jax.interop import conversion, sources
from convbert_jax.models import build
from convbert_jax.models.networks import MaskedLanguageModel
from convbert_jax.recipes.inspection import InspectionError
from convbert_jax.workdir import Workdir
from tests.interop.conftest import make_run  # noqa: F401
from tests.pictures import shows_something
from tests.refusals import refused

TEXTS = ["the river stone of light", "over the great house fire", "a stone house under the moon",
         "stone", "light over light under light and so on and on and on and on"]  # fmt: skip


@pytest.fixture(scope="module")
def mixed(make_run):  # noqa: F811
    folder, _ = make_run(recipe="masked_lm", embedding_size=32)
    return str(folder)


@pytest.fixture(scope="module")
def exported(make_run, tmp_path_factory):  # noqa: F811
    """An attention-only model in Hugging Face format."""
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
    """Compares with the network applied to one text at a time, without padding."""
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
        shares.append(inspection.concentration(seen["attention"][:, 0]))
        if "stone" in text:
            filters.append(seen["filters"][:, 0, pieces.index("st")])  # then "on", "e"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    assert numbers["tokens"] == sum(lengths)
    np.testing.assert_allclose(
        list(numbers["concentration"].values()),
        np.average(shares, axis=0, weights=lengths),
        atol=1e-5,
    )
    chances = [inspection.chance(n) for n in lengths]
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
    (line,) = theirs["shows_nothing"]
    assert "layers 0 to 1" in line
    assert line in result.report
    heads = read_table(result.folder / "concentration.csv")
    assert len(heads) == 2 * 2 + 2 * 4
    with np.load(result.folder / "maps.npz") as arrays:
        assert arrays["layer-1"].shape[0] == 2
        assert arrays["layer-1-beside"].shape[0] == 4


def test_layers_without_maps_or_filters_are_named(make_run, lines, tmp_path):  # noqa: F811
    stages = tuple(
        StageSection(layers=1, mixer=mixer) for mixer in ("light", "dilated", "attention")
    )
    run, _ = make_run(layers=3, stages=stages, generator={"kind": "uniform"})
    result = recipes.inspect(str(run), texts=lines, word="stone")
    assert result.folder == run / "inside" / "step-3"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    light, dilated, attention = numbers["shows_nothing"]
    for line, layer, lacks, has in (
        (light, "layer 0", ["attention maps"], ["filters"]),
        (dilated, "layer 1", ["attention maps", "filters"], []),
        (attention, "layer 2", ["filters"], ["attention maps"]),
    ):
        assert line.startswith(layer)
        assert not [part for part in lacks if part not in line]
        assert not [part for part in has if part in line]
    assert list(numbers["concentration"]) == ["2"]
    # `light` has the same filters at every position, whatever the context.
    np.testing.assert_allclose(numbers["moved_by_context"]["0"], 0, atol=1e-6)
    for layers, value, mentions in (((1, 2), "1,2", ["0"]), ((3,), 3, ["0 to 2"])):
        with refused(InspectionError, *mentions, field="--layers", value=value):
            recipes.inspect(str(run), texts=lines, word="stone", layers=layers)
    result = recipes.inspect(str(run), texts=lines)
    (line,) = (line for line in result.report.splitlines() if "layer 0" in line)
    assert "--word" in line  # the report suggests --word, which would show this layer's filters


def test_held_out_texts_of_the_run_are_the_default(pretrained):
    result = recipes.inspect(str(pretrained.folder))
    assert result.folder == pretrained.folder / "inside" / "step-4"
    (numbers,) = json.loads((result.folder / "numbers.json").read_text())
    assert 4 < numbers["texts"] <= 64
    assert numbers["tokens"] > 10 * numbers["texts"]
    # a barely trained model attends uniformly
    (heads,) = numbers["concentration"].values()
    np.testing.assert_allclose(heads, numbers["chance"], atol=0.02)
    with refused(InspectionError, "layer 0", field="--word", value="the"):
        recipes.inspect(str(pretrained.folder), word="the")
    with refused(InspectionError, field="--word", value="xylophone", path=pretrained.folder):
        recipes.inspect(str(pretrained.folder), word="xylophone")


def test_nothing_to_see_is_an_error(make_run, mixed, exported, lines, tmp_path):  # noqa: F811
    run, _ = make_run(mixer="separable", generator={"kind": "uniform"})
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    output, nowhere = str(tmp_path / "out"), str(tmp_path / "nowhere.txt")
    for model, options, mentions, parts in (
        (str(run), {"texts": lines}, ["layers 0 to 1"], {"path": run}),
        (
            mixed,
            {"texts": lines, "word": "boat"},
            [5],
            {"field": "--word", "value": "boat", "path": mixed},
        ),
        (mixed, {"texts": str(empty)}, [], {"field": "--input", "path": empty}),
        (mixed, {"texts": nowhere}, [nowhere], {}),
        (mixed, {"texts": lines, "output": str(empty)}, [], {"field": "--output", "path": empty}),
        (exported, {"texts": lines}, [], {"field": "--output", "path": exported}),
        (exported, {"output": output}, [], {"field": "--input", "path": exported}),
        (str(tmp_path / "nothing"), {"texts": lines, "output": output}, ["nothing"], {}),
    ):
        with refused(UserError, *mentions, **parts) as caught:
            recipes.inspect(model, **options)
        assert "\n" not in str(caught.value)
