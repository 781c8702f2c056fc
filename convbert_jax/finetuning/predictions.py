"""Writes predictions: one JSON object per example, files for the GLUE server, and figures.

The server (gluebenchmark.com, "Submit") takes eleven tab-separated files with the header "index",
"prediction". They have labels in the spelling of the data files, or a number for STS-B. The server
rejects incomplete sets. Figures show predictions against labels: confusion, calibration, scatter.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import logging

from convbert_jax import drawing
from convbert_jax.data.tasks.glue import GLUE
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.finetuning import scoring
from convbert_jax.storage import write_text

BINS = 10
NUMBERED = 12  # with more labels, the matrix shows no counts
NAMED = 60  # with more labels, the axes show indices


def draw_confusion(
    path: Path, task: LabelledTask, outputs: scoring.Outputs, labels: Sequence, title: str
) -> None:
    """Plot the confusion matrix: labels by predictions, colored by the share of the row.

    Cells show counts; with many labels, the most frequent confusions are listed instead.
    """
    counts = count_confusions(task, scoring.predict(task, outputs), labels)
    size = len(task.labels)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    listed = size > NUMBERED
    side = float(np.clip(0.55 * size + 1.8, 3.6, 8.5))
    room = 0.09 * max(map(len, task.labels)) if size <= NAMED else 0.0
    with drawing.open_figure(
        path,
        (side + room + (4.2 if listed else 1.1), side + (room if size > 4 else 0.0)),
        [title, *task.labels],
    ) as figure:
        axes = figure.subplots(
            1,
            2 if listed else 1,
            width_ratios=[side + room, 3.6] if listed else None,
            squeeze=False,
        )
        axis = axes[0, 0]
        image = axis.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        figure.colorbar(image, ax=axis, label="share of the label", fraction=0.046, pad=0.03)
        axis.set_xlabel("predicted")
        axis.set_ylabel("label")
        if size <= NAMED:
            font = 9 if size <= NUMBERED else 6
            axis.set_xticks(range(size), task.labels, rotation=90 if size > 4 else 0, fontsize=font)
            axis.set_yticks(range(size), task.labels, fontsize=font)
        if not listed:
            for row, column in np.ndindex(counts.shape):
                axis.text(
                    column,
                    row,
                    f"{counts[row, column]:,}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="white" if shares[row, column] > 0.5 else "black",
                )
        else:
            axes[0, 1].axis("off")
            axes[0, 1].set_title("most frequent confusions", fontsize=10, loc="left")
            axes[0, 1].text(0, 0.99, _list_confusions(task, counts), fontsize=8, va="top")
        accuracy = np.trace(counts) / max(counts.sum(), 1)
        figure.suptitle(f"{title}: {accuracy:.1%} of {counts.sum():,} right", fontsize=11)


def count_confusions(task: LabelledTask, predicted: list, labels: Sequence) -> np.ndarray:
    """Count confusions, [labels, labels], labels by predictions; tagging counts words."""
    if task.kind == "tagging":
        predicted = [tag for tags in predicted for tag in tags]
        labels = [tag for tags in labels for tag in tags]
    counts = np.zeros((len(task.labels),) * 2, int)
    np.add.at(counts, (np.asarray(labels, int), np.asarray(predicted, int)), 1)
    return counts


def _list_confusions(task: LabelledTask, counts: np.ndarray, most: int = 24) -> str:
    """List the most frequent errors, one per line."""
    wrong = counts * (1 - np.eye(len(counts), dtype=int))
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    places = [np.unravel_index(place, wrong.shape) for place in order]
    lines = [
        f"{wrong[row, column]:>4}  {task.labels[row]} as {task.labels[column]}"
        for row, column in places
        if wrong[row, column]
    ]
    return "\n".join(lines) or "none"


def draw_calibration(
    path: Path, task: LabelledTask, outputs: scoring.Outputs, labels: Sequence, title: str
) -> None:
    """Plot accuracy against the predicted probability, and the number of answers per bin."""
    confidence, right = judge_answers(task, outputs, labels)
    means, shares, counts = bin_confidence(confidence, right)
    with drawing.open_figure(path, (4.4, 5.4), [title]) as figure:
        (above, below) = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
        above.plot([0, 1], [0, 1], color="0.5", ls="--", lw=1, label="calibrated")
        there = counts > 0
        above.plot(means[there], shares[there], marker="o", ms=4, color="C0", label="model")
        above.set_ylabel("share right")
        above.set_ylim(0, 1.02)
        above.legend(frameon=False, fontsize=9, loc="upper left")
        error = calibration_error(confidence, right)
        above.set_title(f"{title}\nexpected calibration error {error:.3f}", fontsize=10)
        below.bar((np.arange(BINS) + 0.5) / BINS, counts, width=0.9 / BINS, color="C0")
        below.set_ylabel("answers")
        below.set_xlabel("probability of the answer")
        below.set_xlim(0, 1)
        for axis in (above, below):
            axis.grid(alpha=0.25)


def judge_answers(
    task: LabelledTask, outputs: scoring.Outputs, labels: Sequence
) -> tuple[np.ndarray, np.ndarray]:
    """Return each answer's probability [N] and whether it is correct [N]; tagging uses words."""
    shares = [scoring.probabilities(task, values) for values in outputs]
    if task.kind == "tagging":
        shares = np.concatenate(shares)
        labels = [tag for tags in labels for tag in tags]
    shares = np.asarray(shares)
    return shares.max(-1), shares.argmax(-1) == np.asarray(labels)


def bin_confidence(
    confidence: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean probability, accuracy and number of answers in BINS equal bins."""
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    counts = np.bincount(place, minlength=BINS)
    divisor = np.maximum(counts, 1)
    means = np.bincount(place, weights=confidence, minlength=BINS) / divisor
    return means, np.bincount(place, weights=right, minlength=BINS) / divisor, counts


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Compute the expected calibration error (Guo et al. 2017, equation 3).

    It is the mean distance of probability and accuracy over the bins, weighted by answers.
    """
    means, shares, counts = bin_confidence(confidence, right)
    return float((counts * np.abs(means - shares)).sum() / counts.sum())


def draw_scatter(
    path: Path, task: LabelledTask, outputs: scoring.Outputs, labels: Sequence, title: str
) -> None:
    """Plot predicted numbers against the labels."""
    predicted = scoring.predict(task, outputs)
    ends = min(labels), max(labels)
    with drawing.open_figure(path, (4.6, 4.4), [title]) as figure:
        axis = figure.subplots()
        axis.plot(ends, ends, color="0.5", ls="--", lw=1, label="equal")
        axis.plot(labels, predicted, ".", ms=4, alpha=0.35, color="C0")
        axis.set_xlabel("label")
        axis.set_ylabel("predicted")
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=9)


FIGURES = {
    "classification": {"confusion": draw_confusion, "calibration": draw_calibration},
    "tagging": {"confusion": draw_confusion, "calibration": draw_calibration},
    "regression": {"scatter": draw_scatter},
}


# (task, split) -> file name of the GLUE server
SERVER_FILES = {
    ("CoLA", "test"): "CoLA.tsv",
    ("SST-2", "test"): "SST-2.tsv",
    ("MRPC", "test"): "MRPC.tsv",
    ("STS-B", "test"): "STS-B.tsv",
    ("MNLI", "test_matched"): "MNLI-m.tsv",
    ("MNLI", "test_mismatched"): "MNLI-mm.tsv",
    ("QNLI", "test"): "QNLI.tsv",
    ("QQP", "test"): "QQP.tsv",
    ("RTE", "test"): "RTE.tsv",
    ("WNLI", "test"): "WNLI.tsv",
    ("MNLI", "test_diagnostic"): "AX.tsv",
}


def write_predictions(
    folder: Path,
    task: LabelledTask,
    split: str,
    examples: Sequence[Example],
    outputs: scoring.Outputs,
    *,
    pictures: bool,
) -> list[Path]:
    """Write SPLIT.jsonl.

    Args:
      outputs: As in `scoring.score`.
      pictures: Whether to draw confusion and calibration, if all labels are known.

    Returns:
      The written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{split}.jsonl"]
    lines = describe_examples(task, examples, outputs)
    write_text(written[0], "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    if pictures and all(example.label is not None for example in examples):
        labels = [example.label for example in examples]
        title = f"{task.name}, {split}"
        for name, draw in FIGURES.get(task.kind, {}).items():
            path = folder / f"{split}-{name}.png"
            draw(path, task, outputs, labels, title)
            written.append(path)
    return written


def describe_examples(
    task: LabelledTask, examples: Sequence[Example], outputs: scoring.Outputs
) -> list[dict]:
    """Return one JSON-ready dict per example.

    It has id, texts, label (None if unknown), prediction and probabilities; for tagging, the
    probability of each predicted tag. For multilabel, label and prediction are lists.
    """
    predicted = scoring.predict(task, outputs)
    lines = []
    for example, answer, values in zip(examples, predicted, outputs, strict=True):
        line = {"id": example.id}
        if task.kind == "tagging":
            line["words"] = example.texts[0].split(" ")
        else:
            line["texts"] = list(example.texts)
        line["label"] = _name(task, example.label)
        line["prediction"] = _name(task, answer)
        if task.kind != "regression":
            shares = scoring.probabilities(task, values)
        if task.kind in ("classification", "multilabel"):
            named = zip(task.labels, shares.tolist(), strict=True)
            line["probabilities"] = {label: round(share, 6) for label, share in named}
        elif task.kind == "tagging":
            line["probabilities"] = [round(share, 6) for share in shares.max(-1).tolist()]
        lines.append(line)
    return lines


def _name(task: LabelledTask, label):
    """Return a label by name."""
    if label is None or task.kind == "regression":
        return label
    if task.kind in ("tagging", "multilabel"):
        return [task.labels[index] for index in label]
    return task.labels[label]


# --- The GLUE server ---


def write_server_file(
    folder: Path,
    task: LabelledTask,
    split: str,
    examples: Sequence[Example],
    outputs: scoring.Outputs,
) -> Path | None:
    """Write the server's file of a GLUE test split; return None for other splits."""
    name = SERVER_FILES.get((task.name, split))
    if name is None:
        return None
    answers = scoring.predict(task, outputs)
    if task.kind == "classification":
        answers = [task.spellings[answer] for answer in answers]
    rows = zip((example.id for example in examples), answers, strict=True)
    folder.mkdir(parents=True, exist_ok=True)
    return _write_server_rows(folder / name, rows)


def complete_server_files(folder: Path) -> list[str]:
    """Write a constant answer to all missing server files, and log a warning.

    Returns:
      The names of these files.
    """
    missing = []
    for (task, split), name in SERVER_FILES.items():
        if (folder / name).exists():
            continue
        table = GLUE[task]
        # WNLI: not_entailment, which scores 65.1 like ConvBERT's rows of the leaderboard.
        answer = (table.spellings or table.labels)[0] if table.labels else 0.0
        rows = ((str(index), answer) for index in range(table.splits[split].rows))
        _write_server_rows(folder / name, rows)
        missing.append(name)
    if missing:
        logging.warning(
            "%s: no predictions for %s; wrote the same answer for every row, because the server "
            "requires all eleven files.",
            folder,
            ", ".join(missing),
        )
    return missing


def _write_server_rows(path: Path, rows) -> Path:
    lines = ["index\tprediction", *(f"{index}\t{answer}" for index, answer in rows)]
    write_text(path, "\n".join(lines) + "\n")
    return path
