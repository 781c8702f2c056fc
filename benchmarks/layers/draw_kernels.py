"""Bar chart of dynamic convolution costs on TPUs, from dynamic_conv.py --json.

for chip in v5e v5p v6e; do
    python -m benchmarks.layers.dynamic_conv --target=tpu:$chip --json
done > kernels.jsonl
python benchmarks/layers/draw_kernels.py kernels.jsonl benchmarks/figures/kernels.png
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OPS = {
    "dynamic_conv": "dynamic convolution",
    "span_dynamic_conv": "with its filters: projection, softmax, convolution",
}
BARS = {
    "published formula as einsum": ("published formula", "#b0b0b0"),
    "xla": ("shift and accumulate, XLA", "#7fa7d1"),
    "pallas_tpu": ("ours, Pallas", "#1f4e8c"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lines", type=pathlib.Path, help="JSON lines")
    parser.add_argument("picture", type=pathlib.Path, help="output PNG")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.lines.read_text().splitlines()]
    rows = [row for row in rows if row["direction"] == "forward_backward" and row["cost"]]
    targets = list(dict.fromkeys(row["target"] for row in rows))
    figure, axes = plt.subplots(1, len(OPS), figsize=(10, 3.6), sharey=True)
    for axis, (op, title) in zip(axes, OPS.items(), strict=True):
        draw(axis, [row for row in rows if row["op"] == op], targets)
        axis.set_title(title, fontsize=10)
    axes[0].set_ylabel("thousand cycles, forward and backward\n(the TPU compiler's model)")
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(options.picture, dpi=150)


def draw(axis, rows: list[dict], targets: list[str]) -> None:
    width = 0.8 / len(BARS)
    for number, (implementation, (label, color)) in enumerate(BARS.items()):
        for place, target in enumerate(targets):
            found = [
                row for row in rows
                if row["implementation"] == implementation and row["target"] == target
            ]  # fmt: skip
            if not found:
                continue
            x, cost = place + (number - (len(BARS) - 1) / 2) * width, found[0]["cost"]
            axis.bar(x, cost, width * 0.95, color=color, label=label if place == 0 else None)
            axis.text(x, cost * 1.05, f"{cost:,.0f}", ha="center", fontsize=7)
    for place, target in enumerate(targets):
        floors = [row["floor"] for row in rows if row["target"] == target and row["floor"]]
        if floors:
            axis.hlines(
                floors[0], place - 0.42, place + 0.42, colors="#c0392b", linestyles="--",
                label="floor: memory traffic" if place == 0 else None,
            )  # fmt: skip
    axis.set_xticks(range(len(targets)), [target.removeprefix("tpu:") for target in targets])
    axis.set_yscale("log")
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    main()
