"""The documented export to ONNX: a Hugging Face folder through PyTorch's exporter."""

import numpy as np
import pytest

from convbert_jax.interop import huggingface, parity
from tests.interop.conftest import random_network

pytestmark = [pytest.mark.parity, pytest.mark.slow]
NAMES = ("input_ids", "attention_mask", "token_type_ids")


@pytest.mark.parametrize(
    ("fields", "name", "head"),
    [
        ({"mask_convolution": False}, "generator", "mlm_head"),
        ({"mask_convolution": False}, "main", "hidden"),
        ({"mixer": "attention"}, "main", "rtd_head"),
    ],
    ids=["convbert mlm", "convbert encoder", "electra"],
)
def test_onnxruntime_gives_our_numbers(tmp_path, fields, name, head):
    torch, transformers, onnxruntime, _ = (
        pytest.importorskip(name) for name in ("torch", "transformers", "onnxruntime", "onnxscript")
    )
    network = random_network(name, **fields)
    huggingface.write_network(tmp_path, network, pad_id=0)
    architecture = transformers.AutoConfig.from_pretrained(tmp_path).architectures[0]
    model = getattr(transformers, architecture).from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    tokens, mask, types = parity.sample_inputs(network)
    free = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=tokens.shape[1])}
    torch.onnx.export(
        model.eval(),
        tuple(torch.tensor(array) for array in (tokens, mask, types)),
        tmp_path / "model.onnx",
        input_names=NAMES,
        dynamo=True,
        dynamic_shapes=(free,) * 3,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    for batch, length in ((4, tokens.shape[1]), (2, 17)):
        arrays = [array[:batch, :length] for array in (tokens, mask, types)]
        found = session.run(None, dict(zip(NAMES, arrays, strict=True)))[0]
        expected = parity.our_outputs(network, *arrays)[head]
        real = arrays[1].astype(bool) if "mixer" in fields else slice(None)
        np.testing.assert_allclose(found[real], expected[real], atol=1e-5)
