"""Export of a Hugging Face folder to ONNX with PyTorch's exporter, checked with ONNX Runtime.

FOLDER/onnx/model.onnx        the class of the folder in float32, any batch and length
FOLDER/onnx/model_int8.onnx   the same with int8 weights, if requested

Inputs are input_ids, attention_mask and, if the model has segment types, token_type_ids, int64
[batch, length]. Outputs have the names of transformers: last_hidden_state of an encoder, logits, or
start_logits and end_logits of a head. A model for vectors also has sentence_embedding.
"""

import contextlib
import importlib.util
import logging as python_logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from convbert_jax.config.training import POOLINGS
from convbert_jax.interop import huggingface, parity, sentence_transformers
from convbert_jax.interop.networks import ConversionError, Network
from convbert_jax.interop.sentence_transformers import VectorConfig
from convbert_jax.objectives.contrastive import pool

_PACKAGES = ("torch", "transformers", "onnx", "onnxscript", "onnxruntime")
_LIMIT = (
    1e-5  # largest difference in float32, as a fraction of the largest output if this exceeds 1
)
_LARGEST_FILE = 1_900_000_000  # bytes; a protocol buffer holds at most 2^31
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
FOLDER, MODEL, INT8 = "onnx", "model.onnx", "model_int8.onnx"


def check_packages() -> None:
    """Raises ConversionError if a package for the export is not installed."""
    missing = [name for name in _PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise ConversionError(
            f"Cannot export to ONNX: {', '.join(missing)} is not installed. Run pip install "
            "'.[onnx]'.",
            field="--format",
            value="onnx",
        )


def write(
    folder: Path,
    network: Network,
    *,
    vectors: VectorConfig | None = None,
    quantize: str | None = None,
    texts: Sequence[Sequence[str]] = (),
) -> list[str]:
    """Adds ONNX files to the Hugging Face folder of a network.

    Args:
      vectors: adds the output sentence_embedding to the encoder; its head is left out.
      quantize: "int8" also writes a quantized model; None does not.
      texts: examples for the comparison of the quantized model, each of one text or two; rows of
        random tokens if empty.

    Returns:
      The results of the checks, as sentences for the log and the model card.

    Raises:
      ParityError: ONNX Runtime computes other outputs.
    """
    model, large = _load(folder, network, vectors), _bytes(network) > _LARGEST_FILE
    path = folder / FOLDER / MODEL
    path.parent.mkdir()
    names = _export(path, model, network, external_data=large)
    lines = [_check(path, network, names, vectors)]
    if quantize:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        exported = onnx.load(path)
        # The exporter leaves shapes of weights from before it transposed them.
        del exported.graph.value_info[:]
        with _quiet():
            quantize_dynamic(
                exported,
                path.with_name(INT8),
                per_channel=True,
                weight_type=QuantType.QInt8,
                use_external_data_format=large,
            )
        lines.append(_compare(folder, network, names, texts))
    return lines


def _bytes(network: Network) -> int:
    return sum(array.nbytes for array in network.parameters.values())


def _load(folder: Path, network: Network, vectors: VectorConfig | None):
    """Returns a PyTorch module: inputs -> tuple of outputs, whose names are in `names`."""
    import torch

    options = {"add_pooling_layer": False} if _class(network) == "BertModel" else {}
    model = parity.load_class(
        folder, network, masked=network.masked, attn_implementation="eager", **options
    )
    if vectors:
        model = model.base_model

    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask, token_type_ids=None):
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            found = dict(model(input_ids=input_ids, attention_mask=attention_mask, **types))
            found.pop("pooler_output", None)
            if vectors:
                hidden = found["last_hidden_state"]
                real = attention_mask[..., None].to(hidden.dtype)
                parts = {"cls": hidden[:, 0], "mean": (hidden * real).sum(1) / real.sum(1)}
                pooled = torch.cat([parts[name] for name in POOLINGS[vectors.pooling]], -1)
                if vectors.normalize:
                    pooled = torch.nn.functional.normalize(pooled, dim=-1)
                found["sentence_embedding"] = pooled
            self.names = tuple(found)
            return tuple(found.values())

    return Outputs().eval()


def _class(network: Network) -> str:
    return huggingface.architecture(network)


def _export(path: Path, model, network: Network, *, external_data: bool) -> tuple[str, ...]:
    """Writes the float32 model and returns the names of its outputs."""
    import torch

    inputs = _named(network, *parity.sample_inputs(network))
    arguments = tuple(map(torch.tensor, inputs.values()))
    with torch.no_grad():
        model(*arguments)
    dims = {
        0: torch.export.Dim("batch"),
        1: torch.export.Dim("length", max=network.embeddings.positions),
    }
    with _quiet():
        torch.onnx.export(
            model,
            arguments,
            path,
            input_names=list(inputs),
            output_names=list(model.names),
            dynamic_shapes=(dims,) * len(inputs),
            dynamo=True,
            external_data=external_data,
            verbose=False,
        )
    return model.names


def _named(network: Network, tokens, mask, types) -> dict[str, np.ndarray]:
    arrays = (tokens, mask, types) if network.embeddings.types else (tokens, mask)
    return {name: array.astype(np.int64) for name, array in zip(_INPUTS, arrays, strict=False)}


def run(path: Path, network: Network, tokens, mask, types) -> list[np.ndarray]:
    """Returns the outputs of ONNX Runtime on the CPU, in the order of the model."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, _named(network, tokens, mask, types))


def _check(path: Path, network: Network, names, vectors: VectorConfig | None) -> str:
    """Compares ONNX Runtime with this package on texts alone, padded and in another batch."""
    import onnxruntime

    tokens, mask, types = parity.sample_inputs(network)
    length, half = int(mask[-1].sum()), max(1, mask.shape[1] // 2)
    worst: dict[str, float] = {}
    for rows, width in ((slice(-1, None), length), (slice(None), None), (slice(1, None), half)):
        arrays = [array[rows, :width] for array in (tokens, mask, types)]
        ours = _expected(parity.our_outputs(network, *arrays), arrays[1], network, vectors)
        for name, found in zip(names, run(path, network, *arrays), strict=True):
            real = arrays[1] > 0 if _is_per_token(network, name) else slice(None)
            expected, found = ours[name][real], found[real]
            allowed = _LIMIT * max(1.0, float(np.abs(expected).max()))
            difference = float(np.abs(expected - found).max())
            worst[name] = max(worst.get(name, 0.0), difference)
            if not difference <= allowed:
                raise parity.ParityError(
                    f"{path} failed the check with ONNX Runtime: {name} differs by "
                    f"{difference:.1e} (limit {allowed:.0e}) for {len(found)} rows of "
                    f"{arrays[1].shape[1]} tokens. Do not use this file; report this as a bug of "
                    "convbert_jax.",
                    path=path,
                )
    shown = "; ".join(f"{name}: {difference:.1e}" for name, difference in worst.items())
    return (
        f"`{FOLDER}/{MODEL}`: largest difference of ONNX Runtime {onnxruntime.__version__} in "
        f"float32 for a text alone, padded, and in another batch: {shown}."
    )


def _is_per_token(network: Network, name: str) -> bool:
    """Returns whether an output has a value for each token, rather than for each row."""
    of_rows = _class(network).endswith(("ForSequenceClassification", "ForNextSentencePrediction"))
    pooled = ("sentence_embedding", "seq_relationship_logits", *("logits",) * of_rows)
    return name not in pooled


def _expected(
    ours: Mapping[str, np.ndarray], mask, network: Network, vectors: VectorConfig | None
) -> dict[str, np.ndarray]:
    """Returns our outputs by their names in ONNX."""
    found = {"last_hidden_state": ours["hidden"]}
    heads = {"mlm_head": "prediction_logits", "pair_head": "seq_relationship_logits"}
    found |= {name: ours[head] for head, name in heads.items() if head in ours}
    for head, suffix in huggingface.CLASSES.items():
        if head in ours and _class(network).endswith(suffix):
            found["logits"] = ours[head]
    if "span_head" in ours:
        found["start_logits"], found["end_logits"] = np.moveaxis(ours["span_head"], -1, 0)
    if vectors:
        pooled = np.asarray(pool(ours["hidden"], mask, vectors.pooling))
        normalized = sentence_transformers.normalize(pooled)
        found["sentence_embedding"] = normalized if vectors.normalize else pooled
    return found


def _compare(folder: Path, network: Network, names, texts: Sequence[Sequence[str]]) -> str:
    """Measures the last output of the quantized model against the float32 model."""
    tokens, mask, types = parity.example_batch(folder, network, texts)
    float32, int8 = (
        run(folder / FOLDER / file, network, tokens, mask, types)[-1] for file in (MODEL, INT8)
    )
    if _is_per_token(network, names[-1]):
        float32, int8 = float32[mask > 0], int8[mask > 0]
    first, second = (x.reshape(len(x), -1) for x in (float32, int8))
    size = (folder / FOLDER / INT8).stat().st_size / (folder / FOLDER / MODEL).stat().st_size
    said = f"largest difference {np.abs(first - second).max():.1e}"
    if first.shape[1] > 1:
        pairs = (sentence_transformers.normalize(x) for x in (first, second))
        cosines = np.multiply(*pairs).sum(1)
        said += f", cosine similarity {cosines.mean():.4f} on average and at least "
        said += f"{cosines.min():.4f}"
    kind = "texts of the run" if texts else "rows of random tokens"
    return (
        f"`{FOLDER}/{INT8}`: int8 weights, {size:.0%} of the size. {names[-1]} compared with "
        f"float32 on {len(tokens)} {kind}: {said}."
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporters' progress and their advice for other models."""
    before = python_logging.root.manager.disable
    python_logging.disable(python_logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        python_logging.disable(before)
