"""Makes a `FinetuneTask` from a classification, regression or tagging task."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from absl import logging

from convbert_jax.config import Config, OutputsSection
from convbert_jax.config.finetuning import choose_head
from convbert_jax.data.tasks.labelled_text import (
    IGNORED,
    Encoded,
    Example,
    LabelledTask,
    Rows,
    encode_texts,
    encode_words,
    require_labels,
    swap_texts,
)
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import predictions as prediction_files
from convbert_jax.finetuning import scoring
from convbert_jax.finetuning.task import (
    Collected,
    FinetuneTask,
    FinetuningError,
    Predicted,
    Scores,
    rows_evaluator,
    warn_of_unknown,
)
from convbert_jax.interfaces import Evaluator
from convbert_jax.objectives import classification

# Tasks with few labels are compiled with this width, so that most of GLUE shares one program.
_LEAST_WIDTH = 4
# Epochs of GLUE tasks that the official code trains for longer than 3 epochs.
_EPOCHS = {"RTE": 10.0, "STS-B": 10.0}
NUMBER = "value"  # name of a regression's single output


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model of the same task, used for distillation.

    Attributes:
      logits_of: Maps texts to logits [N, labels], in the order of the task's labels.
      checksum: Checksum of the teacher's weights.
    """

    logits_of: Callable[[Sequence[tuple[str, ...]]], np.ndarray]
    checksum: str


def make_task(
    source: LabelledTask,
    config: Config,
    tokenizer: Tokenizer,
    *,
    teacher: Teacher | None = None,
) -> FinetuneTask:
    """Read and encode a labeled task.

    Raises:
      DataError: Files cannot be used, or labels for training or selection are missing.
      FinetuningError: The task has two texts but the model one segment type, or the task is
        tagging or multilabel and there is a teacher.
      ConfigError: The head or a metric does not fit the task.
    """
    scoring.check_metrics(source)
    outputs = outputs_of(source, config)
    f = config.finetune
    train = source.read("train")
    require_labels(source, "train", train)
    if f.train_rows and f.train_rows < len(train):
        chosen = np.random.default_rng(config.seed).permutation(len(train))[: f.train_rows]
        logging.info("%s: training on %d of %d rows.", source.name, f.train_rows, len(train))
        train = [train[i] for i in np.sort(chosen)]
    if f.swap_pairs and source.swap_pairs:
        train = swap_texts(train)
    splits = {name: source.read(name) for name in source.splits if _is_evaluated(source, name)}
    for name in source.validation_splits:
        if name in splits:
            require_labels(source, name, splits[name])
    width = compiled_width(len(outputs.labels))
    constants = constants_of(outputs, width)

    def encode(split: str, examples: Sequence[Example]) -> Rows:
        encoded = encode_examples(examples, outputs, config, tokenizer)
        title = f"{source.name}, {split}"
        _log_truncated(encoded, len(examples), f.length, title)
        texts = [text for example in examples for text in example.texts]
        warn_of_unknown(texts, tokenizer, config, title)
        return encoded.rows

    rows = encode("train", train)
    own = {"tagging": classification.tag_losses, "multilabel": classification.label_losses}
    losses = own.get(source.kind, classification.text_losses)
    if teacher:
        if source.kind in own:
            raise FinetuningError(
                f"{source.name} is a {source.kind} task, which config.finetune.distill_from does "
                "not support. Remove config.finetune.distill_from.",
                field="config.finetune.distill_from",
            )
        said = teacher.logits_of([example.texts for example in train])
        rows = rows.with_columns(teacher=_widen(said, width))
        losses = classification.distilled_losses
        constants |= {
            "temperature": np.float32(f.distill_temperature),
            "teacher_weight": np.float32(f.distill_weight),
        }
    evaluation = {name: encode(name, examples) for name, examples in splits.items()}

    def convert(split: str, found: Predicted):
        words = [len(example.texts[0].split(" ")) for example in splits[split]]
        return in_label_units(outputs, evaluation[split], found, words)

    def score(split: str, found: Predicted) -> Scores:
        labels = [example.label for example in splits[split]]
        return scoring.score(source, convert(split, found), labels)

    def evaluator(split: str) -> Evaluator[Collected]:
        labelled = all(example.label is not None for example in splits[split])
        names = source.metrics if labelled else ()
        return rows_evaluator(len(splits[split]), names, functools.partial(score, split))

    def write(folder: Path, split: str, collected: Collected, *, pictures: bool) -> None:
        said = (folder, source, split, splits[split], convert(split, collected.predicted()))
        prediction_files.write_predictions(*said, pictures=pictures)
        prediction_files.write_server_file(*said)

    return FinetuneTask(
        name=source.name,
        outputs=outputs,
        width=width,
        losses=losses,
        predict=predict_logits,
        constants=constants,
        epochs=_EPOCHS.get(source.name, 3.0),
        train=rows,
        evaluation=evaluation,
        evaluators={name: evaluator(name) for name in splits},
        write=write,
        teacher=teacher.checksum if teacher else None,
    )


def outputs_of(source: LabelledTask, config: Config) -> OutputsSection:
    """Return the description of the model's outputs for this task.

    Raises:
      FinetuningError: The task has two texts but the model has one segment type.
    """
    if source.texts == 2 and config.model.types == 1:
        raise FinetuningError(
            f"{source.name} has two texts, but the model has only one segment type "
            f"(config.model.types={config.model.types}). Use weights with two segment types.",
            field="config.model.types",
            value=config.model.types,
        )
    return OutputsSection(
        task=source.name,
        kind=source.kind,
        head=_choose_head(source, config),
        labels=source.labels or (NUMBER,),
        scale=source.scale,
        texts=source.texts,
        columns=source.columns,
    )


def _choose_head(source, config):
    whole = config.encoder.reads_whole_row
    head = choose_head(config.finetune.head, source.kind, source.name, whole)
    if source.kind != "tagging" and not whole:
        if head == "first_and_mean":
            logging.info(
                "%s: using finetune.head=%s, because no layer of this encoder sees the whole row.",
                source.name,
                head,
            )
        else:
            logging.warning(
                "%s: config.finetune.head=%s reads only [CLS], which in this encoder sees only the "
                "beginning of a text; use --config.finetune.head=first_and_mean to read all of it.",
                source.name,
                head,
            )
    return head


def compiled_width(labels: int) -> int:
    """Return the number of logits of the compiled head: a power of two."""
    return max(_LEAST_WIDTH, 1 << (labels - 1).bit_length())


def constants_of(outputs: OutputsSection, width: int) -> dict[str, np.ndarray]:
    """Return the batch entries of `objectives.classification` that are the same for all rows."""
    return {
        "outputs": np.arange(width) < len(outputs.labels),
        "is_regression": np.asarray(outputs.kind == "regression"),
    }


def predict_logits(model, batch, *, dtype: jnp.dtype) -> dict:
    """Return {"logits": [B, W], or [B, L, W] for tagging}."""
    return {"logits": classification.text_logits(model, batch, dtype=dtype)}


def encode_examples(
    examples: Sequence[Example],
    outputs: OutputsSection,
    config: Config,
    tokenizer: Tokenizer,
) -> Encoded:
    """Encode rows with their labels; missing labels are 0."""
    length = config.finetune.length
    labels = [example.label for example in examples]
    if outputs.kind == "tagging":
        words = [example.texts[0].split(" ") for example in examples]
        return encode_words(tokenizer, words, labels, length=length)
    texts = [example.texts for example in examples]
    encoded = encode_texts(tokenizer, texts, length=length, types=config.model.types)
    if outputs.kind == "multilabel":
        found = np.zeros((len(labels), compiled_width(len(outputs.labels))), np.float32)
        for row, of_text in zip(found, labels, strict=True):
            row[list(of_text or ())] = 1.0
        return dataclasses.replace(encoded, rows=encoded.rows.with_columns(labels=found))
    numbers = np.asarray([0 if label is None else label for label in labels], np.float32)
    is_number = outputs.kind == "regression"
    rows = encoded.rows.with_columns(
        label=np.zeros_like(numbers, np.int32) if is_number else numbers.astype(np.int32),
        value=numbers / outputs.scale if is_number else np.zeros_like(numbers),
    )
    return dataclasses.replace(encoded, rows=rows)


def words_read(rows: Rows) -> np.ndarray:
    """Return [N], the number of words of each row of `encode_words` before truncation."""
    return (rows.by_token["words"] != IGNORED).sum(1)


def in_label_units(outputs: OutputsSection, rows: Rows, found: Predicted, words: Sequence[int]):
    """Convert outputs: drop padded logits, rescale numbers to the label unit, map tags to words.

    Args:
      words: Number of words of each example, for tagging. Words cut by truncation get the logits
        of label O, or else of the first label, because scores count all words; see `words_read`.
    """
    logits, count = found["logits"], len(outputs.labels)
    if outputs.kind in ("classification", "multilabel"):
        return np.asarray(logits)[:, :count]
    if outputs.kind == "regression":
        return np.asarray(logits)[:, 0] * outputs.scale
    outside = outputs.labels.index("O") if "O" in outputs.labels else 0
    results = []
    for i, values in enumerate(logits):
        result = np.full((words[i], count), -1.0, np.float32)
        result[:, outside] = 0.0
        begins = np.asarray(rows.by_token["words"][i, : len(values)])
        places = np.flatnonzero(begins != IGNORED)
        result[begins[places]] = values[places, :count]
        results.append(result)
    return results


def _is_evaluated(source: LabelledTask, split: str) -> bool:
    return split != "train" and source.has(split)


def _widen(logits: np.ndarray, width: int) -> np.ndarray:
    return np.pad(logits.astype(np.float32), [(0, 0), (0, width - logits.shape[1])])


def _log_truncated(encoded: Encoded, count: int, length: int, title: str) -> None:
    if encoded.truncated:
        logging.info(
            "%s: truncated %d of %d texts (%.1f%%) to %d tokens.",
            title,
            encoded.truncated,
            count,
            100 * encoded.truncated / count,
            length,
        )
