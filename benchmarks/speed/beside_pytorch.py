"""Shared code of decoder benchmarks against PyTorch: mixers, vocabulary, timing and table."""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable

from benchmarks import timing

MIXERS = ("attention", "light", "dynamic")
WORDS, PAD, START, END = 8_000, 0, 2, 3


def race(ours: dict[str, Callable], theirs: Callable, rounds: int) -> dict:
    """Returns medians of alternating runs; `ratio` is the median of PyTorch / ours over rounds."""
    times = timing.alternate({**ours, "theirs": theirs}, rounds)
    baseline = times.pop("theirs")
    found = {"pytorch_ms": statistics.median(baseline)}
    for name, of_ours in times.items():
        pairs = [b / a for a, b in zip(of_ours, baseline, strict=True)]
        found[name] = {
            "ms": statistics.median(of_ours),
            "ratio": timing.paired_ratio(of_ours, baseline),
            "low": min(pairs),
            "high": max(pairs),
        }
    return found


def report(title: str, figures: dict[str, dict], arguments: argparse.Namespace) -> None:
    """Prints a line for each race; writes all figures to the `--json` file."""
    cores = len(os.sched_getaffinity(0))
    print(f"{title}, float32, {cores} threads, {platform.processor() or platform.machine()}")
    print(f"{'':34}{'PyTorch, ms':>12}" + "".join(f"{m + ', ms':>15}{'ratio':>7}" for m in MIXERS))
    for name, figure in figures.items():
        ours = "".join(f"{figure[m]['ms']:15.1f}{figure[m]['ratio']:7.2f}" for m in MIXERS)
        print(f"{name:34}{figure['pytorch_ms']:12.1f}{ours}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(vars(arguments) | {"results": figures}, file)
