"""Compares a run in phases with one linear schedule at equal tokens, over three seeds.

    python -m benchmarks.quality.phases runs/phases --steps=1500

Masked words, configs/tiny.py, a tenth of enwiki-2015 below CONVBERT_DATA. Seeds change parameters,
masks and the order of rows; the held-out rows and their masks are the same for all runs. Repeat the
command to continue. Writes the figure FOLDER/phases.png.
"""

import argparse
import statistics
from pathlib import Path

from benchmarks import public_data

SCHEDULES = {
    "linear": [],
    "constant, then 1-sqrt": [
        {"name": "stable", "length": "80%"},
        {"name": "decay", "length": "20%", "schedule": "1-sqrt"},
    ],
}
SEEDS = (1, 2, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--steps", type=int, default=1500, help="steps of each run")
    arguments = parser.parse_args()
    runs = {
        name: [train(arguments.folder, arguments.steps, name, seed) for seed in SEEDS]
        for name in SCHEDULES
    }
    print(f"held-out loss of masked words, nats, after {arguments.steps:,} steps; seeds {SEEDS}")
    for name, of_name in runs.items():
        last = [curve[max(curve)] for curve in of_name]
        spread = f"{statistics.mean(last):.3f} ± {statistics.stdev(last):.3f}"
        print(f"{name:22} {spread}   {', '.join(f'{loss:.3f}' for loss in last)}")
    draw(runs, arguments.folder / "phases.png")


def train(folder: Path, steps: int, name: str, seed: int) -> dict[int, float]:
    """Returns the held-out loss by step."""
    import convbert_jax

    number = list(SCHEDULES).index(name)
    run = convbert_jax.pretrain(
        "tiny",
        folder / f"{number}-{seed}",
        **{
            "recipe": "masked_lm",
            "seed": seed,
            "data.source": f"text:{public_data.folder('pretrain/enwiki-2015')}/train/*_0?.txt.gz",
            "data.directory": str(folder / "shards"),
            "train.steps": steps,
            "train.eval_every": steps // 10,
            "checkpoint.every": steps // 2,
            "optimizer.warmup_steps": steps // 15,
            "phases": SCHEDULES[name],
        },
    )
    return {
        record["step"]: record["mlm_loss"]
        for record in run.metrics
        if record["split"] == "validation"
    }


def draw(runs: dict[str, list[dict[int, float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, of_name in runs.items():
        steps = sorted(of_name[0])
        means = [statistics.mean(curve[step] for curve in of_name) for step in steps]
        (line,) = axes.plot(steps, means, label=name)
        for curve in of_name:
            axes.scatter(steps, [curve[step] for step in steps], s=6, color=line.get_color())
    axes.set(xlabel="steps", ylabel="held-out loss of masked words, nats")
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
