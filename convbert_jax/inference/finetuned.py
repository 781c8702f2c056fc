"""Fine-tuned models from anywhere: for predictions, and as teachers."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from convbert_jax.config import Config, ConfigError, MeshSection, OutputsSection
from convbert_jax.config.checks.finetuning import HEADS_OF_KIND
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.finetuning import origin
from convbert_jax.finetuning.tasks import classification
from convbert_jax.finetuning.tasks.task import FinetuningError
from convbert_jax.inference.answering import QuestionAnswerer
from convbert_jax.inference.predictor import Predictor
from convbert_jax.interop import matching, sources
from convbert_jax.interop.networks import Network, join
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.training import sharding
from convbert_jax.training.environment import devices
from convbert_jax.workdir import Workdir

# head of a network -> (kind of task, config.outputs.head)
_KINDS = {
    "sequence_head": ("classification", "sequence"),
    "token_head": ("tagging", "token"),
    "span_head": ("span", "span"),
}
_SPAN_LENGTH = 384  # tokens of a window for a model that does not say
_UNNAMED = "LABEL_"  # how Hugging Face calls classes without names


def make_predictor(
    config: Config, params, tokenizer: Tokenizer, dtype
) -> Predictor | QuestionAnswerer:
    """What answers lines, for the kind of `config.outputs`."""
    kind = QuestionAnswerer if config.outputs.kind == "span" else Predictor
    return kind(config, params, tokenizer, dtype)


def read_finetuned(path: str, texts: int | None = None) -> tuple[Config, Any, Tokenizer]:
    """A fine-tuned model: its config, its parameters on the host, its vocabulary.

    Args:
      path: folder of a run that fine-tuning made (WORKDIR/TASK/seed-N), or a Hugging Face folder
        of a model for sequences, tokens or answers.
      texts: how many it reads, for a folder that does not say; None takes one there.

    Raises:
      ConfigError: it is not fine-tuned, or there are several in it, or it reads another number of
        texts.
      ConversionError, CheckpointError: it cannot be read.
    """
    workdir = Workdir(path)
    if workdir.holds_run():
        config = workdir.read_config()
        if config.recipe != "finetune":
            raise ConfigError(
                f"{path} is a {config.recipe} run, which predicts no labels; fine-tune it first "
                f"(--config.init_from={path}).",
                path=path,
            )
        _check_texts(path, config, texts)
        _, params = sources.read_params(workdir, config)
        return config, params, read_tokenizer(workdir, config)[0]
    refuse_several(path)
    return from_source(path, sources.read_source(path), texts)


def refuse_several(path: str) -> None:
    """Raises ConfigError where `path` is a whole run of fine-tuning, with its models inside."""
    if inside := Workdir(path).models():
        raise ConfigError(
            f"{path} holds {len(inside)} models; name one of them, as {inside[0]}.", path=path
        )


def _check_texts(path: str, config: Config, texts: int | None) -> None:
    if texts not in (None, config.outputs.texts):
        known = ", ".join(config.outputs.columns)
        raise ConfigError(
            f"is asked for (the columns of --texts on a command line), but {path} reads "
            f"{config.outputs.texts} of each row{f' ({known})' if known else ''}; name as many.",
            field="texts",
            value=texts,
            path=path,
        )
    if config.outputs.texts > config.model.types:
        raise ConfigError(
            f"{path} has one segment type, which cannot tell two texts apart.", path=path
        )


def _says_texts(path: str) -> bool:
    """Whether the number of texts that a model reads is known, and not assumed."""
    if Workdir(path).holds_run():
        return True
    return "outputs.texts" in sources.read_source(path).networks["main"].use


def is_finetuned(source: sources.Source) -> bool:
    """Whether the weights have a head for labels."""
    return any(source.networks["main"].has(head) for head in _KINDS)


def from_source(
    path: str, source: sources.Source, texts: int | None = None
) -> tuple[Config, Any, Tokenizer]:
    """As `read_finetuned`, for weights that were not fine-tuned here.

    Args:
      path: where they are from.
    """
    main = source.networks["main"]
    heads = [head for head in _KINDS if main.has(head)]
    if not heads:
        raise ConfigError(f"{path} has no head for labels; fine-tune it first.", path=path)
    if source.not_read and not source.tokenizer:
        raise ConfigError(
            f"{source.not_read}; if they are to be split as BERT does all the same, copy "
            "config.json, the weights and vocab.txt alone to another folder and name that."
        )
    if not source.tokenizer:
        raise ConfigError(f"{path} has no vocabulary beside its weights; copy it there.", path=path)
    tokenizer, section = sources.open_vocabulary(path, source)
    start = Config(name=Path(path).name, recipe="finetune", tokenizer=section)
    config = matching.replace(start, matching.derive_fields({"main": main}, start))
    config = dataclasses.replace(config, outputs=_outputs(path, main, heads[0], texts))
    _check_texts(path, config, texts)
    config = matching.replace(config, _finetune_fields(config, main, heads[0]))
    _tell_assumed(path, config, main)
    return config, join(config, {"main": main})[0], tokenizer


def _finetune_fields(config: Config, network: Network, head: str) -> dict[str, Any]:
    """How long the rows are, as far as their config.json says it."""
    f = config.finetune
    buckets = () if config.encoder.reads_padding else f.buckets
    length = _SPAN_LENGTH if head == "span_head" else f.length
    told = {path: value for path, value in network.use.items() if path.startswith("finetune.")}
    fields = {"finetune.length": length, "finetune.buckets": buckets} | told
    length = fields["finetune.length"] = min(fields["finetune.length"], config.model.positions)
    if head == "span_head":  # a short row has room for a context too
        fields.setdefault("finetune.query_length", min(f.query_length, length // 2))
    return fields


def _tell_assumed(path: str, config: Config, network: Network) -> None:
    """Says what a folder leaves open and what it was taken for."""
    outputs, length = config.outputs, config.finetune.length
    if outputs.head == "sequence" and "outputs.texts" not in network.use:
        logging.warning(
            "%s does not say how many texts it reads, nor how long: taken as %d of up to %d "
            "tokens. If that is wrong, name as many columns to --mode=predict, as "
            '--texts=FIRST,SECOND, or write {"convbert_jax": {"use": {"outputs.texts": 2, '
            '"finetune.length": %d}}} into its config.json.',
            path,
            outputs.texts,
            length,
            length,
        )
    elif "finetune.length" not in network.use:
        behind = {"tagging": "; words behind them get no prediction", "span": " a window"}
        logging.warning(
            "%s does not say how long its texts are: taken as up to %d tokens%s. If that is "
            'wrong, write {"convbert_jax": {"use": {"finetune.length": %d}}} into its config.json.',
            path,
            length,
            behind.get(outputs.kind, ""),
            config.model.positions,
        )
    if config.encoder.reads_padding and "finetune.length" not in network.use:
        logging.warning(
            "%s was trained to read padding, so its predictions depend on it: they are those of "
            "texts padded to %d tokens; of a text alone, as encode() reads it, others.",
            path,
            length,
        )


def _outputs(path: str, network: Network, head: str, texts: int | None) -> OutputsSection:
    kind, name = _KINDS[head]
    labels = ("start", "end") if kind == "span" else network.labels
    if kind == "classification" and len(labels) == 1:
        kind = "regression"
    assumed = 2 if kind == "span" else 1
    if name == "sequence" and texts:
        assumed = texts
    outputs = OutputsSection(
        task=Path(path).name, kind=kind, head=name, labels=labels, texts=assumed
    )
    fields = ((*field.split("."), value) for field, value in network.use.items())
    told = {field: value for section, field, value in fields if section == "outputs"}
    outputs = dataclasses.replace(outputs, **told)
    if name not in HEADS_OF_KIND.get(outputs.kind, ()):
        raise ConfigError(
            f"{path} is a model for {outputs.kind}, which its {name} head is not for here; "
            "classification, regression, tagging and answers can be predicted.",
            path=path,
        )
    if outputs.kind == "regression" and len(labels) != 1:
        raise ConfigError(
            f"{path} gives {len(labels)} numbers for a text; one can be predicted.", path=path
        )
    return outputs


def open_teacher(path: str) -> "Teacher":
    """The model of `config.finetune.distill_from`.

    Raises:
      ConfigError: it is not fine-tuned, or does not classify.
    """
    config, params, tokenizer = read_finetuned(path)
    if config.outputs.kind not in ("classification", "regression"):
        raise ConfigError(
            f"is a model for {config.outputs.kind}; a teacher classifies texts or gives "
            "them numbers.",
            field="config.finetune.distill_from",
            value=path,
        )
    dtype = devices.compute_dtype(config, jax.devices()[0])
    return Teacher(path, Predictor(config, params, tokenizer, dtype), origin.of_weights(params))


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A fine-tuned model that says what its logits are."""

    path: str
    predictor: Predictor
    checksum: str  # of its weights

    def for_task(self, task: LabelledTask) -> classification.Teacher:
        """What it says of a task: logits, or numbers [N, 1] in the unit that its model learns.

        Raises:
          FinetuningError: the teacher is for something else.
        """
        theirs = self.predictor.outputs
        names = task.labels or theirs.labels
        unnamed = all(label.startswith(_UNNAMED) for label in theirs.labels)
        same = len(names) == len(theirs.labels) if unnamed else set(names) == set(theirs.labels)
        if theirs.kind != task.kind or not same:
            raise FinetuningError(
                f"gives {theirs.kind} with the labels {', '.join(theirs.labels)}; "
                f"{task.name} is {task.kind} with {', '.join(names)}: name a teacher of "
                "this task.",
                field="config.finetune.distill_from",
                value=self.path,
            )
        if theirs.texts != task.texts and _says_texts(self.path):
            raise FinetuningError(
                f"reads {theirs.texts} of the texts of a row, {task.name} has "
                f"{task.texts}: name a teacher of this task.",
                field="config.finetune.distill_from",
                value=self.path,
            )
        order = range(len(names)) if unnamed else [theirs.labels.index(name) for name in names]

        def teach(texts: Sequence[tuple[str, ...]]) -> np.ndarray:
            logging.info("%s: %d texts for the teacher %s.", task.name, len(texts), self.path)
            # Each process asks for itself: over the mesh of the run, kernels would divide the rows
            # among devices that this process cannot read.
            with jax.set_mesh(sharding.make_mesh(MeshSection(data=1), jax.local_devices()[:1])):
                found = self.predictor.predict([Example("", text, None) for text in texts])
            if task.kind == "regression":
                return found[:, None] / task.scale
            return found[:, list(order)]

        return classification.Teacher(teach, self.checksum)
