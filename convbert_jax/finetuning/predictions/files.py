"""Writes predictions: one JSON object per example, files for the GLUE server, and pictures.

The server (gluebenchmark.com, "Submit") takes eleven tab-separated files with the header "index",
"prediction". They have labels in the spelling of the data files, or a number for STS-B. The server
rejects incomplete sets.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import logging

from convbert_jax.data.tasks.glue import GLUE
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.files import write_text
from convbert_jax.finetuning.predictions import pictures as prediction_pictures
from convbert_jax.finetuning.scores import scoring

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
        for name, draw in prediction_pictures.PICTURES[task.kind].items():
            path = folder / f"{split}-{name}.png"
            draw(path, task, outputs, labels, title)
            written.append(path)
    return written


def describe_examples(
    task: LabelledTask, examples: Sequence[Example], outputs: scoring.Outputs
) -> list[dict]:
    """Return one JSON-ready dict per example.

    It has id, texts, label (None if unknown), prediction and probabilities; for tagging, the
    probability of each predicted tag.
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
        if task.kind == "classification":
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
    if task.kind == "tagging":
        return [task.labels[tag] for tag in label]
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
