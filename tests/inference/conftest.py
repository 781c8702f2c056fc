"""Models of every kind with random weights, and predict() to query them."""

import csv
import gzip
import io
import json
from types import SimpleNamespace

import jax
import pytest

from convbert_jax.config import OutputsSection
from convbert_jax.finetuning import run
from convbert_jax.inference import loading, model
from convbert_jax.inference import stream as prediction_stream
from convbert_jax.interop.matching import replace
from convbert_jax.models import build
from convbert_jax.models.networks import FinetunedModel
from convbert_jax.recipes import prediction
from convbert_jax.workdir import Workdir
from tests.finetuning.conftest import make_config, vocabulary  # noqa: F401

LABELS = ("bad", "good")

MODELS = {
    "one": OutputsSection("own", "classification", "sequence", LABELS, columns=("review",)),
    "pair": OutputsSection("own", "classification", "sequence", LABELS, 1.0, 2, ("said", "meant")),
    "number": OutputsSection(
        "own", "regression", "sequence", ("value",), 5.0, 2, ("said", "meant")
    ),
    "tags": OutputsSection("own", "tagging", "token", ("O", "B-X"), columns=("tokens",)),
    "answers": OutputsSection(
        "squad_v2", "span", "span", ("start", "end"), texts=2, columns=("question", "context")
    ),
}
PAIRS = [("the sun", "a moon"), ("over", "under the tree"), ("fire", "fire water")]


def as_table(delimiter, rows, names) -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter).writerows([names, *rows])
    return file.getvalue()


def stop_after(chunks, monkeypatch):
    """Interrupt prediction after some chunks, like Ctrl-C."""
    answer, left = prediction_stream.answer_rows, iter(range(chunks))

    def stops(*arguments):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(prediction_stream, "answer_rows", stops)


@pytest.fixture(scope="session")
def models(make_config, vocabulary, tmp_path_factory):  # noqa: F811
    """Name -> folder of a model with random weights, as saved by fine-tuning."""
    found = {}
    for name, outputs in MODELS.items():
        fields = {"task.texts": outputs.columns, "finetune.tasks": ("own",), "task.id": "key"}
        if name == "answers":
            fields = {"finetune.query_length": 4, "finetune.stride": 4}
        config = replace(make_config(finetune__buckets=()), fields)
        own = replace(config, {f"outputs.{k}": v for k, v in vars(outputs).items()})
        params = jax.device_get(build(FinetunedModel, own)[1](jax.random.key(3)))
        params = jax.tree.map(lambda leaf: 9 * leaf, params)  # makes outputs differ
        found[name] = tmp_path_factory.mktemp(name) / "model"
        task = SimpleNamespace(name="own", outputs=outputs)
        run.save_model(Workdir(found[name]), config, task, vocabulary, params, 1, 0)
    return found


@pytest.fixture(scope="module", autouse=True)
def _compiled_once():
    """Read and compile each model once for all tests."""
    known: dict = {}

    def once(function, key):
        def call(*arguments):
            place = (key, *map(str, arguments[:2])) if key == "read" else (key, arguments[0])
            if place not in known:
                known[place] = function(*arguments)
            return known[place]

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_finetuned", once(loading.read_finetuned, "read"))
        make = once(prediction.make_predictor, "make")
        for module in (prediction, model):
            patch.setattr(module, "make_predictor", make)
        yield


@pytest.fixture
def predict(models, tmp_path):
    """predict(model, input content, input name, output name, ...) -> the output's content."""

    def call(model, content, name="in.txt", output="out.jsonl", **options):
        data = content if isinstance(content, bytes) else content.encode()
        source, target = tmp_path / name, tmp_path / output
        source.write_bytes(data)
        target.unlink(missing_ok=True)
        prediction.predict(str(models[model]), str(source), str(target), **options)
        text = gzip.decompress(target.read_bytes()) if output.endswith(".gz") else None
        text = (text or target.read_bytes()).decode()
        return text if ".jsonl" not in output else [json.loads(x) for x in text.split("\n")[:-1]]

    return call
