"""Exported fine-tuned models store how they are used: texts, columns, length, kind."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest

from convbert_jax.config import ConfigError
from convbert_jax.data.tasks.labelled_text import Example
from convbert_jax.inference import loading
from convbert_jax.inference.predictor import Predictor
from convbert_jax.interop import conversion, huggingface, networks, parity
from convbert_jax.interop.networks import ConversionError
from convbert_jax.storage import DamagedFileError
from tests.interop.conftest import random_network, random_params, with_head
from tests.refusals import refused

REPOSITORY = pathlib.Path(__file__).resolve().parents[3]
PAIR = {"texts": 2, "columns": ["premise", "hypothesis"], "labels": ["no", "maybe", "yes"]}
NUMBER = {"kind": "regression", "labels": ["degree"], "scale": 5.0, "columns": ["said"]}
TEXTS = {"pair": ("bar gest", "dend"), "number": ("bar gest dend",)}
EXAMPLES = {what: [Example("0", texts, None)] for what, texts in TEXTS.items()}


@pytest.fixture(scope="module", params=["pair", "number"])
def exported(request, make_run):
    """(kind, run, exported folder, folder after reading and exporting again)."""
    outputs = {"pair": PAIR, "number": NUMBER}[request.param]
    finetune = {"length": 20, "buckets": []}
    run, _ = make_run(recipe="finetune", outputs=outputs, finetune=finetune)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "pytorch_is_there", lambda: False)
        folder = conversion.export(run)
        again = conversion.convert(str(folder), run.parent / "again")
    return request.param, run, folder, again


def edit(folder, target, **fields):
    """Copy a folder and change fields of its config.json."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    content = json.loads((folder / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(content))
    return str(target)


def test_a_folder_predicts_as_its_run(exported):
    what, run, *folders = exported
    expected = Predictor(*loading.read_finetuned(str(run)), np.float32)
    for folder in folders:
        found = Predictor(*loading.read_finetuned(str(folder)), np.float32)
        assert found.outputs.texts == expected.outputs.texts
        assert found.outputs.columns == expected.outputs.columns
        assert found._config.finetune.length == 20
        (ours,), (theirs,) = expected.answer(EXAMPLES[what]), found.answer(EXAMPLES[what])
        assert ours.keys() == theirs.keys()
        for name in ("probabilities", "prediction"):
            if name in ours:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5)


def test_their_classes_know_the_kind(exported):
    what, _, folder, again = exported
    kinds = {"pair": "single_label_classification", "number": "regression"}
    for place in (folder, again):
        content = json.loads((place / "config.json").read_text())
        assert content["problem_type"] == kinds[what]
        columns = {"pair": ("`premise`", "`hypothesis`", "20"), "number": ("`said`", "20")}
        assert all(column in (place / "README.md").read_text() for column in columns[what])


@pytest.mark.parity
def test_their_pipeline_gives_the_number(exported):
    transformers = pytest.importorskip("transformers")
    what, run, folder, _ = exported
    predictor = Predictor(*loading.read_finetuned(str(run)), np.float32)
    ours = predictor.answer(EXAMPLES[what])[0]
    pipeline = transformers.pipeline("text-classification", model=str(folder))
    if what == "number":
        found = pipeline(TEXTS[what][0])[0]
        assert found["label"] == "degree"
        assert found["score"] == pytest.approx(ours["prediction"], abs=1e-4)
    else:
        first, second = TEXTS[what]
        found = pipeline({"text": first, "text_pair": second})
        assert found["label"] == ours["prediction"]
        assert found["score"] == pytest.approx(max(ours["probabilities"].values()), abs=1e-4)


DAMAGED = [
    ({"outputs.texts": 7}, "outputs.texts"),
    ({"outputs.texts": "two"}, "outputs.texts"),
    ({"outputs.columns": ["a", "b"], "outputs.texts": 1}, "outputs.columns"),
    ({"outputs.kind": "poems"}, "outputs.kind"),
    ({"finetune.length": -1}, "finetune.length"),
    ({"train.steps": 3}, "train.steps"),
    ([], "convbert_jax.use"),
]


def test_a_damaged_use_is_refused(exported, tmp_path):
    for number, (use, field) in enumerate(DAMAGED):
        folder = tmp_path / str(number)
        edit(exported[2], folder, convbert_jax={"use": use})
        with refused(ConversionError, field):
            huggingface.read_folder(folder)


def test_folders_that_do_not_say_it(exported, tmp_path, caplog):
    what, _, folder, _ = exported
    caplog.clear()
    config, *_ = loading.read_finetuned(edit(folder, tmp_path / "it", convbert_jax={}))
    assert config.outputs.texts == 1
    assert config.outputs.kind == {"pair": "classification", "number": "regression"}[what]
    assert any(record.levelname == "WARNING" for record in caplog.records)


@pytest.mark.usefixtures("without_pytorch")
def test_folders_that_read_padding(make_run, tmp_path, caplog):
    """Predictions of models that read padding depend on the length; a guessed length is logged."""
    finetune = {"length": 20, "buckets": []}
    run, _ = make_run(recipe="finetune", outputs=NUMBER, finetune=finetune, mask_convolution=False)
    folder = conversion.export(run, output=tmp_path / "a")
    caplog.clear()
    loading.read_finetuned(str(folder))
    assert not [record for record in caplog.records if 24 in (record.args or ())]
    loading.read_finetuned(edit(folder, tmp_path / "b", convbert_jax={}))
    # One record for the guess, one for the dependence on the length.
    assert len([record for record in caplog.records if 24 in (record.args or ())]) == 2


def test_kinds_that_cannot_be_predicted(exported, tmp_path):
    what, _, folder, _ = exported
    fields = {"problem_type": ["regression"], "convbert_jax": {}}
    with refused(ConversionError, field="problem_type", value=["regression"]):
        loading.read_finetuned(edit(folder, tmp_path / "c", **fields))
    if what == "pair":
        fields = {"problem_type": "regression", "convbert_jax": {}}
        with refused(ConfigError, "3"):
            loading.read_finetuned(edit(folder, tmp_path / "b", **fields))


# --- labels that padding changes in Hugging Face's classes ---


@pytest.mark.parity
@pytest.mark.parametrize("head", ["sequence_head", "token_head", "span_head"])
def test_changed_labels_are_those_of_rows_alone(tmp_path, head):
    """Compares each row without padding to the padded batch, both in Hugging Face's class."""
    pytest.importorskip("torch")
    labels = ("start", "end") if head == "span_head" else ("no", "maybe", "yes")
    network = with_head(random_network(seed=5, mask_convolution=True), head, labels)
    tokens, mask, types = parity.sample_inputs(network, rows=50)
    if head == "sequence_head":  # random weights favor a label; make all equally likely
        logits = parity.our_outputs(network, tokens, mask, types)[head]
        bias = network.parameters[f"{head}/output/bias"]
        changes = {f"{head}/output/bias": bias - logits.mean(0)}
        network = dataclasses.replace(network, parameters={**network.parameters, **changes})
    huggingface.write_network(tmp_path, network, pad_id=0)
    changed, count = parity.changed_labels(tmp_path, network)
    batch = parity.pytorch_outputs(tmp_path, network, tokens, mask, types)[head]
    found, total = 0, 0
    lengths = mask.sum(1)
    for real in np.unique(lengths):  # rows of equal length need no padding
        rows = np.flatnonzero(lengths == real)
        one = (x[rows, :real] for x in (tokens, mask, types))
        alone = parity.pytorch_outputs(tmp_path, network, *one)[head]
        padded = batch[rows][:, :real] if head != "sequence_head" else batch[rows]
        axis = 1 if head == "span_head" else -1
        differs = alone.argmax(axis) != padded.argmax(axis)
        found += differs.any(-1).sum() if head == "span_head" else differs.sum()
        total += len(rows) * (real if head == "token_head" else 1)
    assert (changed, count) == (found, total)
    assert changed > 0


@pytest.mark.parity
def test_card_and_log_tell_the_changed_labels(make_run, tmp_path, caplog):
    pytest.importorskip("torch")
    finetune = {"length": 20, "buckets": []}
    run, _ = make_run(recipe="finetune", outputs=PAIR, finetune=finetune, mask_convolution=True)
    texts = [["bar gest", "dend"], ["bar", "fer mor nost dend"], ["a", "gast"]]
    (run / "predictions").mkdir()
    lines = "".join(json.dumps({"texts": pair, "prediction": "no"}) + "\n" for pair in texts)
    (run / "predictions" / "validation.jsonl").write_text(lines)
    with caplog.at_level("INFO"):
        folder = conversion.export(run, output=tmp_path / "a")
    counted = re.compile(r"\b\d of 3\b")
    assert counted.search(caplog.text)
    assert counted.search((folder / "README.md").read_text())
    (run / "predictions" / "validation.jsonl").write_text(lines + '{"texts"')
    with refused(DamagedFileError, "validation.jsonl"):
        conversion.export(run, output=tmp_path / "b")


@pytest.mark.usefixtures("without_pytorch")
@pytest.mark.parametrize("form", ["huggingface", "tensorflow1"])
def test_an_export_ends_with_one_warning_about_padding(make_run, tmp_path, caplog, form):
    """It contains the measured difference and the page to read."""
    run, config = make_run(mask_convolution=True)
    with caplog.at_level("INFO", "absl"):
        folder = conversion.export(run, output=tmp_path / "a", form=form)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert [caplog.messages[-1]] == warnings
    network = networks.split(config, random_params(config))["main"]
    assert f"{parity.measure_padding(network):.1e}" in warnings[0]
    page, _, heading = re.search(r"(docs/\S+\.md)(#)([\w-]+)", warnings[0]).groups()
    text = (REPOSITORY / page).read_text().lower()
    assert f"\n## {heading.replace('-', ' ')}\n" in text
    if form == "huggingface":
        assert warnings[0].partition(" See ")[0] in (folder / "README.md").read_text()


@pytest.mark.usefixtures("without_pytorch")
def test_an_export_that_is_exact_under_padding_warns_of_nothing(make_run, tmp_path, caplog):
    run, _ = make_run(mask_convolution=False)
    with caplog.at_level("WARNING", "absl"):
        conversion.export(run, output=tmp_path / "a")
    assert caplog.messages == []
