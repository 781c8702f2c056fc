"""Export to ONNX: ONNX Runtime computes our outputs, for any batch and length."""

import dataclasses

import numpy as np
import pytest

import convbert_jax
from convbert_jax.config.training import POOLINGS
from convbert_jax.interop import conversion, huggingface, onnx_export, parity
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.sentence_transformers import VectorConfig
from tests.interop.conftest import MODERN, random_network, with_head
from tests.refusals import refused

NETWORKS = {
    "convbert": lambda: random_network(),
    "convbert that reads padding": lambda: random_network("generator", mask_convolution=False),
    "electra": lambda: random_network(mixer="attention"),
    "bert": lambda: random_network(recipe="masked_lm", mixer="attention", embedding_size=32),
    "modernbert": lambda: random_network(recipe="masked_lm", **MODERN),
    "sequence": lambda: with_head(random_network(), "sequence_head", ("no", "yes")),
    "token": lambda: with_head(random_network(), "token_head", ("no", "yes")),
    "span": lambda: with_head(random_network(), "span_head", ("start", "end")),
}
OUTPUTS = {
    "convbert": ("last_hidden_state",),
    "span": ("start_logits", "end_logits"),
}  # the others have logits


@pytest.fixture
def exporters():
    """Skip if a package for the export is missing."""
    for name in onnx_export._PACKAGES:
        pytest.importorskip(name)


def session(path):
    import onnxruntime

    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.parametrize("kind", NETWORKS)
def test_every_class_is_exported(tmp_path, exporters, kind):
    """`write` compares the outputs; here are the names, and lengths that it did not try."""
    network = NETWORKS[kind]()
    huggingface.write_network(tmp_path, network, pad_id=0, ids={"cls": 2, "sep": 3})
    onnx_export.write(tmp_path, network, quantize="int8")
    int8, opened = (session(tmp_path / "onnx" / f) for f in ("model_int8.onnx", "model.onnx"))
    assert [x.name for x in int8.get_outputs()] == [x.name for x in opened.get_outputs()]
    types = ("token_type_ids",) if network.embeddings.types else ()
    assert tuple(x.name for x in opened.get_inputs()) == ("input_ids", "attention_mask", *types)
    assert tuple(x.name for x in opened.get_outputs()) == OUTPUTS.get(kind, ("logits",))
    for rows, length in ((1, 1), (2, 17), (4, 24)):
        arrays = [array[:rows, :length] for array in parity.sample_inputs(network)]
        found = onnx_export.run(tmp_path / "onnx" / "model.onnx", network, *arrays)
        ours = parity.our_outputs(network, *arrays)
        expected = onnx_export._expected(ours, arrays[1], network, None)
        for name, array in zip((x.name for x in opened.get_outputs()), found, strict=True):
            real = arrays[1] > 0 if onnx_export._is_per_token(network, name) else slice(None)
            np.testing.assert_allclose(array[real], expected[name][real], atol=1e-5)


@pytest.mark.parity
@pytest.mark.slow
def test_a_run_of_vectors(make_run, exporters, monkeypatch):
    """The files of one export: float32 gives the vectors of `encode`, int8 similar ones."""
    monkeypatch.setattr(parity, "pytorch_is_there", lambda: False)
    run, _ = make_run(recipe="embedding", pooling="first_and_mean")
    folder = conversion.export(run, form="onnx", quantize="int8")
    assert folder == run / "onnx" / "step-3"
    import transformers

    texts = ["the river", "a great house under the sun", "", "stone " * 40]
    model = convbert_jax.load(run)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, truncation=True, max_length=model.length, return_tensors="np"
    )
    expected = model.encode(texts)
    for file, least in (("model.onnx", 0.99999), ("model_int8.onnx", 0.8)):
        opened = session(folder / "onnx" / file)
        names = [x.name for x in opened.get_outputs()]
        assert names == ["last_hidden_state", "sentence_embedding"]
        found = opened.run(["sentence_embedding"], dict(batch))[0]
        assert (found * expected).sum(axis=1).min() > least
    assert convbert_jax.load(folder).vectors == model.vectors
    conversion.export(run, form="onnx")  # replaces its own export
    assert not (folder / "onnx" / "model_int8.onnx").exists()


@pytest.mark.parity
@pytest.mark.slow
def test_a_different_output_is_refused(tmp_path, exporters):
    network = random_network(mixer="attention")
    huggingface.write_network(tmp_path, network, pad_id=0)
    changed = dict(network.parameters)
    changed["layers/0/mixer/query/kernel"] = changed["layers/0/mixer/query/kernel"] * 1.01
    other = dataclasses.replace(network, parameters=changed)
    path = tmp_path / "onnx" / "model.onnx"
    with refused(parity.ParityError, "logits", path=path):
        onnx_export.write(tmp_path, other)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("normalize", [True, False])
def test_expected_vectors_leave_padding_out(pooling, normalize):
    hidden = np.array([[[3.0, 4.0], [1.0, 0.0], [9.0, 9.0]]])
    mask = np.array([[1, 1, 0]])
    vector = np.array({"mean": [2, 2], "cls": [3, 4], "first_and_mean": [3, 4, 2, 2]}[pooling])
    expected = vector / np.linalg.norm(vector) if normalize else vector
    vectors = VectorConfig(pooling, normalize)
    found = onnx_export._expected({"hidden": hidden}, mask, random_network(), vectors)
    np.testing.assert_allclose(found["sentence_embedding"], expected[None])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    find = onnx_export.importlib.util.find_spec
    monkeypatch.setattr(
        onnx_export.importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "onnxscript" else find(name, *rest),
    )
    with refused(ConversionError, "onnxscript", "onnx]", field="--format"):
        conversion.convert("somewhere", tmp_path / "out", form="onnx")


@pytest.mark.parametrize(("form", "quantize"), [("huggingface", "int8"), ("onnx", "int4")])
def test_unsupported_quantization_is_refused(tmp_path, exporters, form, quantize):
    with refused(ConversionError, field="quantize", value=quantize):
        conversion.convert("somewhere", tmp_path / "out", form=form, quantize=quantize)
