"""Inference on a CPU: ours, Hugging Face's PyTorch class and ONNX Runtime with the same weights.

    python -m benchmarks.speed.inference --threads 1 2
    python -m benchmarks.speed.inference --parts texts --sizes small --reviews 128 --rounds 5
    python -m benchmarks.speed.inference --dtype bfloat16        # of a processor with AMX

Writes a run with random weights, exports it (docs/howto/export_onnx.md), and compares the outputs.
All programs alternate in one process with the same number of threads, in float32. With bfloat16,
ours and PyTorch (all weights) use bfloat16; ONNX Runtime stays in float32. A pause between turns
lets threads stop spinning. Ratios are medians over consecutive pairs, with minimum and maximum;
above 1 ours is faster. On a busy machine the fastest turns are more reliable. Each number of
threads is a separate process. With one thread the process's CPU time is measured, which other load
hardly changes.

- forward: the encoder at fixed shapes without padding.
- texts: texts per second from strings to vectors, for CoLA's dev set and IMDb reviews in random
  order, truncated to 512 tokens. Compares `model.encode`, transformers'
  pipeline("feature-extraction") and ONNX Runtime, the latter two at the best of three batch sizes.
  ONNX Runtime uses the same tokenizer, with texts sorted by length and padded to the longest of a
  batch.
- startup: from the start of a process to the first vector.

Needs torch, transformers, onnx, onnxscript and onnxruntime, and the data folder (CONVBERT_DATA).
"""

import argparse
import contextlib
import csv
import functools
import gzip
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import public_data, timing
from benchmarks.speed.inference_models import Models, prepare

PARTS = ("forward", "texts", "startup")
SIZES = ("tiny", "small", "base", "modern:17m")
AGREE = {"float32": 1e-4, "bfloat16": 0.2}  # tolerance of outputs
BATCHES = (1, 8, 32)  # batch sizes of the other programs
_REST = 0.02  # seconds between turns, in which threads of the previous program stop spinning
_TURN = 50.0  # minimum milliseconds of a forward turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=SIZES)
    parser.add_argument("--threads", nargs="+", type=int, default=[2])
    parser.add_argument("--shapes", nargs="+", default=["8x128", "1x128", "1x32"])
    parser.add_argument("--sets", nargs="+", default=["CoLA", "IMDb"], choices=("CoLA", "IMDb"))
    parser.add_argument("--reviews", type=int, default=128, help="number of IMDb reviews")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32", choices=tuple(AGREE))
    parser.add_argument("--folder", help="folder of the models; reused")
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # measures compilation
    _be_quiet()
    with _folder(arguments.folder) as folder:
        if len(arguments.threads) > 1:
            for size in arguments.sizes:
                prepare(folder / size, size)
            for count in arguments.threads:
                own = ["--threads", str(count), "--folder", str(folder)]
                command = [sys.executable, "-m", "benchmarks.speed.inference", *sys.argv[1:], *own]
                subprocess.run(command, check=True)
            return
        timing.take_threads(arguments.threads[0])
        print(f"{arguments.dtype}; {timing.describe_processor()}; times in ms")
        columns = ("work", "program", "median", "fastest", "texts/s", "program / ours", "fastest")
        table = timing.Table("size", *columns)
        for size in arguments.sizes:
            for row in measure(folder / size, size, arguments):
                table.add(size, *row)


def measure(folder: Path, size: str, arguments: argparse.Namespace) -> Iterator[tuple]:
    """Yields rows of the table without the size."""
    prepare(folder, size)
    if "forward" in arguments.parts:
        shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
        yield from compare_forward(Models(folder, arguments.dtype), shapes, arguments.rounds)
    if "texts" in arguments.parts:
        models = Models(folder, arguments.dtype)
        for name in arguments.sets:
            texts = read_cola() if name == "CoLA" else read_reviews(arguments.reviews)
            yield from compare_texts(models, name, texts, arguments.rounds)
    if "startup" in arguments.parts:
        yield from measure_startup(folder, arguments.rounds)


# --- The forward pass ---


def compare_forward(models: Models, shapes, rounds: int) -> Iterator[tuple]:
    import jax.numpy as jnp
    import numpy as np

    from convbert_jax.inference.network import POOLED, NetworkOnDevice

    network = NetworkOnDevice(models.ours.networks["main"], jnp.dtype(models.dtype))
    rng = np.random.default_rng(0)
    for rows, length in shapes:
        tokens = rng.integers(5, models.ours.tokenizer.vocab_size, (rows, length))
        inputs = tokens, np.ones_like(tokens), np.zeros_like(tokens)
        names = ("tokens", "segment_ids", "type_ids")
        batch = dict(zip(names, (array.astype(np.int32) for array in inputs), strict=True))

        def ours(batch=batch):
            return np.asarray(network.run(batch, POOLED["none"])["vectors"])[0]

        def onnx(inputs=inputs):
            return models.run_onnx(*inputs)

        def pytorch(inputs=inputs):
            return models.run_torch(*inputs)

        expected = ours()
        for name, found in (("ONNX Runtime", onnx()), ("PyTorch", pytorch())):
            _check_same(name, found, expected, models.dtype)
        runs = {"ours": ours, "ONNX Runtime": onnx, "PyTorch": pytorch}
        times = timing.alternate(runs, rounds, least=_TURN, rest=_REST)
        yield from describe(f"forward {rows}x{length}", times)


def _check_same(name: str, found, expected, dtype: str) -> None:
    import numpy as np

    difference = np.abs(found - expected).max()
    if not difference < AGREE[dtype]:
        raise SystemExit(f"{name} differs by {difference:.1e}; timings are invalid.")


def describe(work: str, times: dict[str, list[float]], count: int | None = None):
    """Yields a row per program; the first is ours. `count` is the number of texts."""
    ours = next(iter(times.values()))
    for name, found in times.items():
        median = statistics.median(found)
        rate = count and 1e3 * count / median
        fastest = min(found) / min(ours)
        yield work, name, median, min(found), rate, timing.describe_ratios(ours, found), fastest


# --- Texts ---


def read_cola() -> list[str]:
    with gzip.open(public_data.folder("glue") / "CoLA" / "dev.tsv.gz", "rt", encoding="utf-8") as f:
        return [row[3] for row in csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE) if row]


def read_reviews(count: int) -> list[str]:
    path = public_data.folder("classification/IMDb") / "test.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        texts = [line.rstrip("\n").split("\t", 2)[2] for line in file]
    return random.Random(0).sample(texts, count)


def compare_texts(models: Models, name: str, texts: Sequence[str], rounds: int) -> Iterator[tuple]:
    """Compares vectors of the first token by text, because other programs do not mask padding."""
    import numpy as np

    def ours(texts=texts):
        return models.ours.encode(texts, pooling="cls")

    pipeline = _pipeline(models)
    for text in texts[:3]:
        expected = ours([text])
        _check_same("the pipeline", pipeline([text], 1), expected, models.dtype)
        _check_same("ONNX Runtime", run_sorted(models, [text], 1), expected, models.dtype)
    others = {
        "pipeline": lambda rows, chosen: pipeline(chosen, rows),
        "ONNX Runtime": lambda rows, chosen: run_sorted(models, chosen, rows),
    }
    runs: dict[str, Callable] = {"ours": ours}
    some = texts[: max(2 * max(BATCHES), len(texts) // 8)]
    for other, run in others.items():
        sizes = {rows: functools.partial(run, rows, some) for rows in BATCHES}
        rows = min((times, rows) for rows, (times,) in timing.alternate(sizes, 1).items())[1]
        runs[f"{other} (batches of {rows})"] = functools.partial(run, rows, texts)
    tokens = np.mean([len(tokens) for tokens in models.ours.tokenize(texts)])
    work = f"{name}, {len(texts)} texts of {tokens:.1f} tokens"
    yield from describe(work, timing.alternate(runs, rounds, rest=_REST), len(texts))


def _pipeline(models: Models) -> Callable:
    import numpy as np
    import transformers

    made = transformers.pipeline(
        "feature-extraction", model=models.torch, tokenizer=models.tokenizer, device="cpu"
    )
    cut = {"truncation": True, "max_length": 512}

    def run(texts: Sequence[str], rows: int):
        found = made(list(texts), batch_size=rows, return_tensors=True, tokenize_kwargs=cut)
        return np.stack([hidden[0, 0].float().numpy() for hidden in found])

    return run


def run_sorted(models: Models, texts: Sequence[str], rows: int):
    """Returns the first vectors by ONNX Runtime, with rows of similar length together."""
    import numpy as np

    ids = models.tokenizer(list(texts), truncation=True, max_length=512)["input_ids"]
    order = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    found: list[Any] = [None] * len(ids)
    for start in range(0, len(order), rows):
        places = order[start : start + rows]
        lengths = np.array([len(ids[place]) for place in places])
        tokens = np.zeros((len(places), lengths.max()), np.int64)
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        tokens[mask > 0] = np.concatenate([ids[place] for place in places])
        hidden = models.run_onnx(tokens, mask, np.zeros_like(tokens))
        for place, vector in zip(places, hidden[:, 0], strict=True):
            found[place] = vector
    return np.stack(found)


# --- Start-up ---

_OURS = """
import convbert_jax
print(convbert_jax.load({folder!r}).encode(["A text of a few words."]).shape, flush=True)
"""
_PYTORCH = """
import transformers
found = transformers.pipeline("feature-extraction", model={folder!r}, device="cpu")
print(len(found("A text of a few words.")), flush=True)
"""


def measure_startup(folder: Path, rounds: int) -> Iterator[tuple]:
    """Measures the seconds from the start of a process to its first vector, in alternation."""
    with tempfile.TemporaryDirectory() as cache:
        ours = _OURS.format(folder=str(folder / "run"))
        pytorch = _PYTORCH.format(folder=str(folder / "exported"))
        yield "start to first vector", "ours, empty compile cache", run_program(ours, cache)
        programs = {"ours": ours, "pipeline": pytorch}
        times = {name: [] for name in programs}
        for _ in range(rounds):
            for name, program in programs.items():
                times[name].append(run_program(program, cache))
    yield from describe("start to first vector", times)


def run_program(program: str, cache: str) -> float:
    """Returns the milliseconds from the start of a Python process to its first line."""
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        line = process.stdout.readline()
        milliseconds = 1e3 * (time.perf_counter() - start)
    if not line:
        raise SystemExit(f"a process ended with {process.returncode} before its first vector.")
    return milliseconds


def _be_quiet() -> None:
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


@contextlib.contextmanager
def _folder(named: str | None) -> Iterator[Path]:
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


if __name__ == "__main__":
    main()
