"""Loaded models of every format, applied to texts.

Outputs equal the network's own, independent of the batch; unsupported calls are refused in one
sentence.
"""

import ast
import json
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import convbert_jax
from convbert_jax.config import UserError
from convbert_jax.inference.model import ModelError
from convbert_jax.inference.network import POOLINGS
from convbert_jax.inference.texts import encode_masked as encode_masked
from convbert_jax.interop import conversion, sources
from convbert_jax.models import build
from convbert_jax.models.networks import MODELS as PRETRAINED
from convbert_jax.workdir import Workdir
from tests.inference.conftest import MODELS, PAIRS
from tests.interop.conftest import make_run  # noqa: F401
from tests.refusals import refused

TEXTS = ["the a of", "stone light", "", ("sun", "a of"), "badar", "over"]
# Attention-only models compile in half the time.
KINDS = {
    "separate": {},
    "reads padding": {"mask_convolution": False},
    "untied": {"mixer": "attention", "generator": {"tie_embeddings": False}},
    "shared": {"mixer": "attention", "generator": {"kind": "shared"}},
    "uniform": {"mixer": "attention", "generator": {"kind": "uniform"}},
    "masked words": {"mixer": "attention", "recipe": "masked_lm"},
    # a TensorFlow checkpoint with attention only does not store its number of heads
    "wordpiece": {"tokenizer": {"kind": "wordpiece"}},
    "byte-level": {
        "mixer": "attention",
        "recipe": "masked_lm",
        "tokenizer": {"kind": "bpe", "vocab_size": 270},
    },
}


@pytest.fixture(scope="module")
def opened(make_run):  # noqa: F811
    """opened(kind) -> (model, folder of its run), cached."""
    known = {}

    def make(kind):
        if kind not in known:
            folder, _ = make_run(**KINDS[kind])
            known[kind] = convbert_jax.load(folder), folder
        return known[kind]

    return make


def directly(model, folder, function, rows, types=None, **arguments):
    """Apply a method of the run's network to `rows`, padded on the right.

    Networks that read padding get one row at a time.
    """
    if model.config.encoder.reads_padding and len(rows) > 1:
        types = types or [None] * len(rows)
        pairs = zip(rows, types, strict=True)
        return [directly(model, folder, function, [r], t and [t])[0] for r, t in pairs]
    config = model.config
    _, params = sources.read_params(Workdir(folder), config)
    own = nnx.merge(build(PRETRAINED[config.recipe], config)[0], params)
    width = max(map(len, rows))
    tokens, kinds = (
        jnp.asarray([[*row, *[0] * (width - len(row))] for row in table])
        for table in (rows, types or [[0]] * len(rows))
    )
    real = jnp.arange(width) < jnp.asarray([[len(row)] for row in rows])
    found = jax.jit(getattr(own, function))(tokens, real.astype(jnp.int32), kinds, **arguments)
    return [np.asarray(f)[: len(row)] for f, row in zip(found, rows, strict=True)]


def rows_of(model, text):
    """Return (ids of a row, its types) as documented."""
    special, parts = model.tokenizer.special, (text,) if isinstance(text, str) else text
    ids, types = [special.cls], [0]
    for number, part in enumerate(model.tokenizer.encode(parts)):
        ids += [*part, special.sep]
        types += [number] * (len(part) + 1)
    assert len(ids) <= model.length
    return ids, types


@pytest.mark.parametrize("kind", ["separate", "reads padding", "masked words"])
def test_encode_is_the_network_run_on_each_text_alone(opened, kind):
    model, folder = opened(kind)
    texts = TEXTS[:4]
    rows, types = zip(*(rows_of(model, text) for text in texts), strict=True)
    hidden = directly(model, folder, "encode", rows, types)
    mean, first = model.encode(texts), model.encode(texts, pooling="cls")
    assert mean.shape == first.shape == (len(texts), 32)
    assert mean.dtype == np.float32
    both = model.encode(texts, pooling="first_and_mean")
    np.testing.assert_allclose(both, np.concatenate([first, mean], axis=1), atol=1e-6)
    every = model.encode(texts, pooling="none")
    assert list(map(len, every)) == list(map(len, model.tokenize(texts))) == list(map(len, rows))
    for number, expected in enumerate(hidden):
        np.testing.assert_allclose(every[number], expected, atol=2e-5)
        np.testing.assert_allclose(mean[number], expected.mean(axis=0), atol=2e-5)
        np.testing.assert_allclose(first[number], expected[0], atol=2e-5)


@pytest.mark.parametrize("kind", ["separate", "reads padding"])
def test_nothing_depends_on_the_batch(opened, kind):
    model, _ = opened(kind)
    texts = [TEXTS[i % len(TEXTS)] for i in range(13)]
    together = model.encode(texts, batch_size=4)
    alone = np.stack([model.encode([text])[0] for text in texts])
    np.testing.assert_allclose(together, alone, atol=2e-5)
    np.testing.assert_allclose(model.encode(texts[::-1], batch_size=1)[::-1], alone, atol=2e-5)
    np.testing.assert_array_equal(model.encode(TEXTS[0]), model.encode(TEXTS[:1])[0])
    assert model.encode([]).shape == (0, 32)
    assert model.encode([], pooling="none") == model.tokenize([]) == []


@pytest.mark.parametrize("kind", ["separate", "reads padding"])
def test_few_shapes_are_compiled(opened, kind):
    """Few lengths are compiled, including for networks that read padding."""
    _, folder = opened(kind)
    model = convbert_jax.load(folder)
    texts = [" ".join(["sun"] * n) for n in range(1, 12)] * 2
    assert len({len(tokens) for tokens in model.tokenize(texts)}) > 4
    model.encode(texts, batch_size=2)
    assert model.network("main").programs == 3  # padded to 8, 12 and 16 tokens
    model.encode(texts, batch_size=2)
    assert model.network("main").programs == 3


def test_layers_are_not_unrolled_on_a_cpu(make_run):  # noqa: F811
    folder, config = make_run(mixer="attention", scan_unroll=2)
    assert config.encoder.scan_unroll == 2
    network = convbert_jax.load(folder).network("main")
    rows = {name: np.ones((1, 8), np.int32) for name in ("tokens", "segment_ids", "type_ids")}
    text = network.lower(rows, POOLINGS["mean"]).as_text()
    assert "stablehlo.while" in text


def test_a_model_in_use_imports_nothing_of_other_software(opened):
    """Such imports would slow down every start by seconds."""
    program = (
        "import sys, convbert_jax\n"
        f"print(convbert_jax.load({str(opened('separate')[1])!r}).encode(['the sun']).shape)\n"
        "print({name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    shape, imported = done.stdout.splitlines()
    assert shape == "(1, 32)"
    others = {
        "torch", "transformers", "tensorflow", "tensorflow_datasets", "matplotlib", "sklearn",
        "pandas", "pyarrow", "scipy", "optuna", "wandb", "mlflow", "tensorboardX",
    }  # fmt: skip
    assert not others & set(ast.literal_eval(imported))


def test_programs_are_kept_for_the_next_start(make_run, tmp_path, monkeypatch):  # noqa: F811
    folder, _ = make_run(mixer="attention")
    told = []
    monkeypatch.setattr(
        "convbert_jax.inference.loading.environment.enable_compile_cache", told.append
    )
    convbert_jax.load(folder)
    conversion.export(folder, output=tmp_path / "hf")
    convbert_jax.load(tmp_path / "hf")
    assert told == ["~/.cache/convbert_jax/compile"] * 2


def test_long_texts_are_cut_and_it_is_said(opened, caplog):
    model, _ = opened("separate")
    long = " ".join(["stone"] * 40)
    assert model.length == 16  # the training length; it has 24 positions
    with caplog.at_level(logging.WARNING, "absl"):
        assert len(model.encode(long, pooling="none")) == 16
        assert [record.args[1:] for record in caplog.records] == [(1, 1, 16)]
    assert len(model.encode(long, pooling="none", length=24)) == 24
    with refused(UserError, 24, field="length", value=25):
        model.encode(long, length=25)


def test_length_is_an_argument_of_every_method(opened, caplog):
    model, _ = opened("separate")
    long = " ".join(["stone"] * 40)
    with caplog.at_level(logging.WARNING, "absl"):
        assert len(model.replaced(long)) == 14
        assert [record.args[1:] for record in caplog.records] == [(1, 1, 16)]
    assert len(model.replaced(long, length=24)) == 22
    words = next(n for n in range(1, 24) if len(model.tokenize("stone " * n, length=24)) > 17)
    hole = "stone " * words + "[MASK]"
    with refused(UserError, 16, "[MASK]"):
        model.fill_mask(hole)
    assert len(model.fill_mask(hole, length=24)) == 5


def test_many_texts_are_computed_in_parts(opened, monkeypatch):
    model, _ = opened("separate")
    texts = ["the a", "stone light", "sun"]
    masked = [f"{text} [MASK]" for text in texts]
    suspects, filled = model.replaced(texts), model.fill_mask(masked)
    monkeypatch.setattr("convbert_jax.inference.model._AT_ONCE", 1)
    for whole, parts in ((suspects, model.replaced(texts)), (filled, model.fill_mask(masked))):
        for one, other in zip(whole, parts, strict=True):
            ours, theirs = ({k: v for d in t for k, v in d.items()} for t in (one, other))
            assert ours == pytest.approx(theirs, abs=1e-5)
    assert all(vector.base is None for vector in model.encode(texts, pooling="none"))


@pytest.mark.parametrize("kind", ["untied", "shared", "masked words", "wordpiece"])
def test_holes_are_filled_by_the_generator(opened, kind):
    model, folder = opened(kind)
    text, special = "the [MASK] of [MASK]", model.tokenizer.special
    ids = [special.cls, *encode_masked(model.tokenizer, text), special.sep]
    places = np.flatnonzero(np.equal(ids, special.mask))
    assert len(places) == 2
    places = jnp.asarray([places])
    (logits,) = directly(model, folder, "generate", [ids], positions=places)
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    # batched with longer and shorter texts that have other numbers of masks
    found = model.fill_mask(["[MASK]", text, "the a of [MASK]"], top_k=60)
    assert [len(f) for f in found] == [60, 2, 60]
    for hole, expected in zip(found[1], probabilities, strict=True):
        assert [f["score"] for f in hole] == sorted((f["score"] for f in hole), reverse=True)
        for f in hole:
            assert f["score"] == pytest.approx(expected[f["token"]], abs=1e-5)
    best = found[1][0][0]
    assert best["token"] == probabilities[0].argmax()
    assert best["sequence"].count("[MASK]") == 1
    assert len(model.fill_mask("the [MASK]")) == 5


@pytest.mark.parametrize("kind", ["separate", "uniform", "reads padding"])
def test_suspects_are_those_of_the_discriminator(opened, kind):
    model, folder = opened(kind)
    texts = ["the a of", "stone", ""]
    found = model.replaced(texts)
    rows = [rows_of(model, text)[0] for text in texts]
    scores = directly(model, folder, "discriminate", rows)
    for text, row, logits, tokens in zip(texts, rows, scores, found, strict=True):
        expected = 1 / (1 + np.exp(-logits[1:-1]))
        np.testing.assert_allclose([t["probability"] for t in tokens], expected, atol=1e-5)
        assert [t["token"] for t in tokens] == model.tokenizer.pieces(row[1:-1])
        places = model.tokenizer.encode_with_offsets([text])[0][1]
        assert [[t["start"], t["end"]] for t in tokens] == places.tolist()
    assert [t["token"] for t in model.replaced("stone")] == [t["token"] for t in found[1]]


def test_what_stands_after_a_hole_is_no_begin_of_a_text(opened):
    """SentencePiece puts a blank before each piece of text it encodes."""
    tokenizer = opened("separate")[0].tokenizer
    mask = tokenizer.special.mask
    whole = tokenizer.encode(["xr"])[0]
    assert tokenizer.pieces(whole)[0].startswith("\u2581")
    (hole, *rest) = encode_masked(tokenizer, "[MASK]r")
    assert hole == mask
    assert tokenizer.pieces(rest) == ["r"]
    (_, *rest) = encode_masked(tokenizer, "[MASK] r")
    assert "".join(tokenizer.pieces(rest)) == "\u2581r"


# --- Other formats ---


@pytest.mark.parametrize("kind", ["separate", "masked words", "byte-level", "reads padding"])
def test_an_exported_folder_is_the_same_model(opened, kind, tmp_path):
    model, folder = opened(kind)
    conversion.export(folder, output=tmp_path / "hf")
    theirs = convbert_jax.load(tmp_path / "hf")
    assert theirs.length == 24  # its positions: the folder does not store the training length
    texts = ["the a of", "stone"]
    np.testing.assert_allclose(theirs.encode(texts), model.encode(texts), atol=2e-5)
    ours, found = (m.fill_mask("the [MASK]", top_k=3) for m in (model, theirs))
    assert [f["token"] for f in ours] == [f["token"] for f in found]
    if kind not in ("masked words", "byte-level"):
        pairs = zip(model.replaced("the a"), theirs.replaced("the a"), strict=True)
        assert all(a["probability"] == pytest.approx(b["probability"], abs=1e-5) for a, b in pairs)


def test_a_tensorflow_checkpoint_needs_its_vocabulary(opened, make_run, tmp_path):  # noqa: F811
    model, folder = opened("wordpiece")
    conversion.export(folder, form="tensorflow1", output=tmp_path / "tf")
    for file in (tmp_path / "tf").glob("*vocab*"):
        file.unlink()
    for file in (tmp_path / "tf").glob("tokenizer*"):
        file.unlink()
    with refused(UserError, "vocab.txt", path=tmp_path / "tf"):
        convbert_jax.load(tmp_path / "tf")
    theirs = convbert_jax.load(tmp_path / "tf", vocabulary=model.tokenizer.path)
    texts = ["the a of", "stone"]
    np.testing.assert_allclose(theirs.encode(texts), model.encode(texts), atol=2e-5)
    beside = tmp_path / "tf" / "vocab.txt"  # found without a flag
    beside.write_text("\n".join(model.tokenizer.entries) + "\n")
    np.testing.assert_allclose(
        convbert_jax.load(tmp_path / "tf").encode(texts), model.encode(texts), atol=2e-5
    )
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*model.tokenizer.entries, "one", "more"]) + "\n")
    with refused(UserError, 62, 60):
        convbert_jax.load(tmp_path / "tf", vocabulary=vocabulary)


def test_a_checkpoint_of_a_run_is_chosen_by_its_step(opened):
    model, folder = opened("separate")
    assert model.step == convbert_jax.load(folder, step=3).step == 3
    for step in (4, -1, "3"):
        with refused(UserError, 3, value=step):
            convbert_jax.load(folder, step=step)


def test_a_run_of_another_machine_is_loaded_here(make_run, caplog):  # noqa: F811
    folder, _ = make_run()
    values = json.loads((folder / "config.json").read_text())
    values.pop("crc32")  # edited by hand below
    values["platform"] = "tpu"
    values["model"] |= {"convolution": "pallas_tpu", "attention_dropout": 0.0}
    (folder / "config.json").write_text(json.dumps(values))
    with caplog.at_level(logging.INFO, "absl"):
        assert convbert_jax.load(folder).encode(["the"]).shape == (1, 32)
    assert "config.model.convolution=pallas_tpu" in caplog.text


# --- Fine-tuned models ---


class Table:
    """A table like those of pandas and polars: iterating it gives the column names."""

    columns = ("text", "label")

    def __iter__(self):
        return iter(self.columns)


QUESTIONS = [("the sun", "the moon and the sun"), ("fire", "water fire star")]
INPUTS = {
    "one": ["the sun", "small moon", " ", {"review": "over under", "key": "c", "other": 1}],
    "pair": [*PAIRS, "one alone", {"said": "the", "meant": "a"}],
    "number": PAIRS,
    "tags": [["the", "sun"], "a small moon", {"tokens": ["over"]}],
    "answers": [*QUESTIONS, {"question": "sun", "context": "the sun", "id": "q"}],
}


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_those_of_the_command_line(name, models, predict):
    model = convbert_jax.load(models[name])
    found = model.predict(INPUTS[name])
    lines = []
    for value in INPUTS[name]:
        if isinstance(value, list):
            value = {"tokens": value}
        elif isinstance(value, tuple):
            value = {"texts": value} if name != "answers" else "\t".join(value)
        lines.append(value if isinstance(value, str) else json.dumps(value))
    expected = predict(name, "\n".join(lines) + "\n")
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.get("prediction") == theirs.get("prediction")
        assert ours.get("probabilities") == theirs.get("probabilities")
        assert ours.get("start") == theirs.get("start")
        assert ("error" in ours) == ("error" in theirs)
        assert ours["id"] == theirs["id"]
    assert model.predict([]) == []
    alone = model.predict({} if name != "one" else INPUTS[name][0])  # one dict is one row
    assert alone["id"] == 0
    assert ("error" in alone) == (name != "one")
    assert model.encode("the sun").shape == (16,)


def test_a_single_row_and_rows_that_cannot_be_predicted(models):
    model = convbert_jax.load(models["one"])
    assert model.predict("the sun")["prediction"] in ("bad", "good")
    assert model.predict({"review": "the sun", "other": 1})["other"] == 1
    (wrong,) = model.predict([5])
    assert wrong == {"id": 0, "error": wrong["error"]}
    assert wrong["error"].startswith("line 1 has int")
    assert model.predict([("a", "b")])[0]["error"].startswith("line 1 has 2")
    with refused(UserError, "rows"):
        model.predict(Table())


# --- Errors ---


@pytest.mark.parametrize(
    ("kind", "call", "field", "mentions"),
    [
        ("uniform", lambda m: m.fill_mask("[MASK]"), None, ()),
        ("masked words", lambda m: m.replaced("the"), None, ()),
        ("separate", lambda m: m.predict(["the"]), None, ()),
        ("separate", lambda m: m.encode([3]), "texts[0]", ()),
        ("separate", lambda m: m.encode([("a", "b", "c")]), "texts[0]", ()),
        ("separate", lambda m: m.encode(["a"], pooling="max"), "pooling", ("mean",)),
        ("separate", lambda m: m.encode(["a"], pooling=["cls"]), "pooling", ("mean",)),
        (
            "separate",
            lambda m: m.encode(np.array("a")),
            "texts",
            (),
        ),
        ("separate", lambda m: m.encode(Table()), "texts", ()),
        ("separate", lambda m: m.fill_mask("the sun"), None, ("the sun", "[MASK]")),
        (
            "separate",
            lambda m: m.fill_mask(20 * "stone " + "[MASK]"),
            None,
            ("[MASK]", 16),
        ),
        ("separate", lambda m: m.fill_mask([("[MASK]", "b")]), "texts[0]", ()),
        (
            "separate",
            lambda m: m.fill_mask("[MASK]", top_k=61),
            "top_k",
            (60,),
        ),
        ("separate", lambda m: m.fill_mask("[MASK]", top_k=2.0), "top_k", ()),
        ("separate", lambda m: m.encode("a", batch_size=0), "batch_size", ()),
        ("separate", lambda m: m.replaced("a", batch_size="3"), "batch_size", ()),
        ("separate", lambda m: m.tokenize("a", length=10.5), "length", ()),
        ("separate", lambda m: m.encode(None), "texts", ()),
        ("separate", lambda m: m.replaced(5), "texts", ()),
        ("separate", lambda m: m.encode({"a": "b"}), "texts", ()),
        ("separate", lambda m: m.encode(b"ab"), "texts", ()),
        ("separate", lambda m: m.encode(["a", "b\ud800"]), "texts[1]", ()),
    ],
)
def test_what_cannot_be_is_one_sentence(opened, kind, call, field, mentions):
    with refused(UserError, *mentions, field=field) as error:
        call(opened(kind)[0])
    assert "\n" not in str(error.value)


def test_paths_that_hold_no_model(opened, models, tmp_path):
    with refused(UserError, tmp_path):
        convbert_jax.load(tmp_path)
    with refused(UserError, "File name too long"):
        convbert_jax.load("x" * 300)
    inside = tmp_path / "task" / "seed-0" / "checkpoints"
    inside.mkdir(parents=True)
    with refused(UserError, "task/seed-0", path=tmp_path):
        convbert_jax.load(tmp_path)
    folder = opened("separate")[1]
    with refused(UserError, path=folder):
        convbert_jax.load(folder, vocabulary="vocab.txt")
    with refused(UserError, field="dtype", value="float16"):
        convbert_jax.load(folder, dtype="float16")


def test_entities_have_the_places_of_their_words(models, monkeypatch):
    model = convbert_jax.load(str(models["tags"]))
    tags = {"Ada": "B-X", "Lovelace": "I-X", "Paris": "B-Y", "!": "I-Y"}

    def predict(rows):
        return [
            {
                "prediction": [tags.get(word, "O") for word in words],
                "probabilities": [1 / (place + 2) for place, _ in enumerate(words)],
            }
            for words in rows
        ]

    monkeypatch.setattr(model, "predict", predict)
    text = " Ada  Lovelace, in Paris!"
    first, second = model.entities(text)
    assert first == {
        "text": "Ada  Lovelace", "label": "X", "start": 1, "end": 14, "probability": 1 / 3
    }  # fmt: skip
    assert (second["text"], second["probability"]) == ("Paris!", 1 / 7)
    assert all(text[e["start"] : e["end"]] == e["text"] for e in (first, second))
    assert model.entities(["", text, "no"]) == [[], [first, second], []]


def test_entities_of_a_model(models):
    model = convbert_jax.load(str(models["tags"]))
    text = "the sun, a moon under the tree. " * 9  # longer than a row
    for entity in model.entities(text):
        assert text[entity["start"] : entity["end"]] == entity["text"]
    assert max(entity["end"] for entity in model.entities(text)) > 150
    with refused(ModelError):
        convbert_jax.load(str(models["one"])).entities(text)


def test_a_model_of_pairs_reranks(models):
    documents = ["a moon", "the river", "small stone", "a moon"]
    number = convbert_jax.load(str(models["number"]))
    hits = number.rerank("the sun", documents)
    expected = [r["prediction"] for r in number.predict([("the sun", d) for d in documents])]
    assert [hit.score for hit in hits] == sorted(expected, reverse=True)
    assert all((hit.text, hit.score) == (documents[hit.place], expected[hit.place]) for hit in hits)
    pair = convbert_jax.load(str(models["pair"]))
    first = pair.rerank("the sun", documents)[0]
    (record,) = pair.predict([("the sun", first.text)])
    assert first.score == record["probabilities"]["good"]
    assert pair.rerank("the sun", []) == []
    with refused(UserError, field="documents[1]"):
        pair.rerank("the sun", ["a", " "])
    with refused(ModelError):
        convbert_jax.load(str(models["one"])).rerank("the sun", documents)
