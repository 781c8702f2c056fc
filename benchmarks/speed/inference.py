"""Inference on a CPU: ours, Hugging Face's PyTorch class and ONNX Runtime with the same weights.

    python -m benchmarks.speed.inference --threads 1 2
    python -m benchmarks.speed.inference --parts texts --sizes small --reviews 128 --rounds 5
    python -m benchmarks.speed.inference --dtype bfloat16        # of a processor with AMX

Writes a run with random weights, exports it to Hugging Face and from there to ONNX with PyTorch's
exporter (docs/weights.md), and compares the outputs. All programs alternate in one process with the
same number of threads, in float32. With bfloat16, ours and PyTorch (all weights) use bfloat16;
ONNX Runtime stays in float32. A pause between turns lets threads stop spinning. Ratios are medians
over consecutive pairs, with minimum and maximum; above 1 ours is faster. On a busy machine the
fastest turns are more reliable. Each number of threads is a separate process. With one thread the
process's CPU time is measured, which other load hardly changes.

- forward: the encoder at fixed shapes without padding.
- texts: texts per second from strings to vectors, for CoLA's dev set and IMDb reviews in random
  order, truncated to 512 tokens. Compares `model.encode`, transformers'
  pipeline("feature-extraction") and ONNX Runtime, the latter two at the best of three batch sizes.
  ONNX Runtime uses the same tokenizer, with texts sorted by length and padded to the longest of a
  batch. Compilation is reported separately.
- startup: from the start of a process to the first vector.

Needs torch, transformers, onnx, onnxscript and onnxruntime, and the data folder (CONVBERT_DATA).
"""

import argparse
import contextlib
import csv
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import public_data, timing
from benchmarks.speed.inference_models import Models, prepare

PARTS = ("forward", "texts", "startup")
AGREE = {"float32": 1e-4, "bfloat16": 0.2}  # tolerance of outputs
BATCHES = (1, 8, 32)  # batch sizes of the other programs
_REST = 0.02  # seconds between turns, in which threads of the previous program stop spinning
_TURN = 0.05  # minimum seconds of a forward turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=("tiny", "small", "base"))
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
        print(f"{arguments.dtype}; {timing.describe_processor()}", flush=True)
        for size in arguments.sizes:
            for line in measure(folder / size, size, arguments):
                print(f"{size}, {line}", flush=True)


def measure(folder: Path, size: str, arguments: argparse.Namespace) -> Iterator[str]:
    prepare(folder, size)
    if "forward" in arguments.parts:
        shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes]
        yield from compare_forward(Models(folder, arguments.dtype), shapes, arguments.rounds)
    if "texts" in arguments.parts:
        models = Models(folder, arguments.dtype)
        for name in arguments.sets:
            texts = read_cola() if name == "CoLA" else read_reviews(arguments.reviews)
            for line in compare_texts(models, texts, arguments.rounds):
                yield f"{name}: {line}"
    if "startup" in arguments.parts:
        yield from measure_startup(folder, arguments.rounds)


# --- The forward pass ---


def compare_forward(models: Models, shapes, rounds: int) -> Iterator[str]:
    import jax.numpy as jnp
    import numpy as np

    from convbert_jax.inference.network import POOLINGS, NetworkOnDevice

    network = NetworkOnDevice(models.ours.networks["main"], jnp.dtype(models.dtype))
    rng = np.random.default_rng(0)
    for rows, length in shapes:
        tokens = rng.integers(5, models.ours.tokenizer.vocab_size, (rows, length))
        inputs = tokens, np.ones_like(tokens), np.zeros_like(tokens)
        names = ("tokens", "segment_ids", "type_ids")
        batch = dict(zip(names, (array.astype(np.int32) for array in inputs), strict=True))

        def ours(batch=batch):
            return np.asarray(network.run(batch, POOLINGS["none"])["vectors"])[0]

        def onnx(inputs=inputs):
            return models.run_onnx(*inputs)

        def pytorch(inputs=inputs):
            return models.run_torch(*inputs)

        expected = ours()
        for name, found in (("ONNX Runtime", onnx()), ("PyTorch", pytorch())):
            _check_same(name, found, expected, models.dtype)
        runs = {"ours": ours, "ONNX Runtime": onnx, "PyTorch": pytorch}
        yield f"forward {rows}x{length}: {_race(runs, rounds, _TURN)}"


def _check_same(name: str, found, expected, dtype: str) -> None:
    import numpy as np

    difference = np.abs(found - expected).max()
    if not difference < AGREE[dtype]:
        raise SystemExit(f"{name} differs by {difference:.1e}; timings are invalid.")


def _race(runs: Mapping[str, Callable], rounds: int, seconds: float = 0.0, count: int = 0) -> str:
    """Times functions in alternation; returns the result as text.

    Args:
      seconds: minimum duration of a turn, by repetition.
      count: items per turn, for a rate per second; 0: reports milliseconds.
    """
    clock = _clock()
    turns = {}
    for name, run in runs.items():
        run()
        start = clock()
        if seconds:
            run()
        repeats = max(1, int(seconds / (clock() - start + 1e-9))) if seconds else 1

        def turn(run=run, repeats=repeats):
            for _ in range(repeats):
                run()

        turns[name] = turn, repeats
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, (turn, repeats) in turns.items():
            time.sleep(_REST)
            start = clock()
            turn()
            times[name].append((clock() - start) / repeats)
    first, *others = runs

    def spell(seconds: float) -> str:
        return f"{count / seconds:.1f}/s" if count else f"{1e3 * seconds:.1f} ms"

    shown = (
        f"{name} {spell(statistics.median(values))} (fastest {spell(min(values))})"
        for name, values in times.items()
    )
    ratios = (
        f"{name} / {first} {timing.describe_ratios(times[first], times[name])}, "
        f"fastest {min(times[name]) / min(times[first]):.2f}"
        for name in others
    )
    return f"{', '.join(shown)}; {'; '.join(ratios)}"


def _clock() -> Callable[[], float]:
    """Returns CPU seconds with one thread, else wall-clock seconds."""
    return time.process_time if len(os.sched_getaffinity(0)) == 1 else time.perf_counter


# --- Texts ---


def read_cola() -> list[str]:
    with gzip.open(public_data.folder("glue") / "CoLA" / "dev.tsv.gz", "rt", encoding="utf-8") as f:
        return [row[3] for row in csv.reader(f, delimiter="\t", quoting=csv.QUOTE_NONE) if row]


def read_reviews(count: int) -> list[str]:
    path = public_data.folder("classification/IMDb") / "test.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        texts = [line.rstrip("\n").split("\t", 2)[2] for line in file]
    return random.Random(0).sample(texts, count)


def compare_texts(
    models: Models, texts: Sequence[str], rounds: int, batches: Sequence[int] = BATCHES
) -> Iterator[str]:
    """Compares vectors of the first token by text, because other programs do not mask padding."""
    import numpy as np

    def ours(texts=texts):
        return models.ours.encode(texts, pooling="cls")

    clock = _clock()
    start = clock()
    ours()
    first = clock() - start
    start = clock()
    ours()
    compiling = first - (clock() - start)
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
    for name, run in others.items():
        rows = _best_rows(run, texts[: max(2 * max(batches), len(texts) // 8)], batches)
        runs[f"{name} (batches of {rows})"] = lambda run=run, rows=rows: run(rows, texts)
    network = models.ours.networks["main"]
    lengths = [len(tokens) for tokens in models.ours.tokenize(texts)]
    yield (
        f"{len(texts)} texts of {np.mean(lengths):.1f} tokens, {network.encoder.depth} layers; "
        f"compilation takes {compiling:.1f} s, for {_programs(models)} programs so far"
    )
    yield _race(runs, rounds, count=len(texts))


def _programs(models: Models) -> int:
    return models.ours.network("main").programs


def _best_rows(run: Callable, texts: Sequence[str], batches: Sequence[int]) -> int:
    seconds = {}
    for rows in batches:
        run(rows, texts[:2])
        start = time.perf_counter()
        run(rows, texts)
        seconds[rows] = time.perf_counter() - start
    return min(seconds, key=seconds.get)


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


def measure_startup(folder: Path, rounds: int) -> Iterator[str]:
    """Measures the seconds from the start of a process to its first vector, in alternation."""
    with tempfile.TemporaryDirectory() as cache:
        ours = _OURS.format(folder=str(folder / "run"))
        cold = _seconds_to_first_line(ours, cache)
        times: dict[str, list[float]] = {"ours": [], "pipeline": []}
        for _ in range(rounds):
            times["ours"].append(_seconds_to_first_line(ours, cache))
            pytorch = _PYTORCH.format(folder=str(folder / "exported"))
            times["pipeline"].append(_seconds_to_first_line(pytorch, cache))
    medians = ", ".join(
        f"{name} {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})"
        for name, values in times.items()
    )
    yield f"start to first vector: with an empty compile cache {cold:.2f} s; {medians}"


def _seconds_to_first_line(program: str, cache: str) -> float:
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
        seconds = time.perf_counter() - start
    if not line:
        raise SystemExit(f"a process ended with {process.returncode} before its first vector.")
    return seconds


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
