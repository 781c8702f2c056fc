"""Loads a run, a fine-tuned model or weights of other libraries (`convbert_jax.load`)."""

import dataclasses
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from convbert_jax.config import Config, ConfigError, MeshSection, OutputsSection
from convbert_jax.config.finetuning import HEADS_OF_KIND
from convbert_jax.data.errors import shorten
from convbert_jax.data.tasks.labelled_text import Example, LabelledTask
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, follow_file
from convbert_jax.finetuning import classification, run_files
from convbert_jax.finetuning.task import FinetuningError
from convbert_jax.inference.generation import change_decoding
from convbert_jax.inference.model import Model, ModelError, TextModel
from convbert_jax.inference.predictor import Predictor
from convbert_jax.interop import matching, sentence_transformers, sources
from convbert_jax.interop.networks import Network, join, split
from convbert_jax.interop.sources import read_tokenizer
from convbert_jax.training import environment, partitioning
from convbert_jax.workdir import Workdir

# head of a network -> (kind of task, config.outputs.head)
_KINDS = {
    "sequence_head": ("classification", "sequence"),
    "token_head": ("tagging", "token"),
    "span_head": ("span", "span"),
}
_SPAN_LENGTH = 384  # default tokens of a window
_UNNAMED = "LABEL_"  # prefix of default class names in Hugging Face configs


def read_finetuned(path: str, texts: int | None = None) -> tuple[Config, Any, Tokenizer]:
    """Reads a fine-tuned model.

    Args:
      path: folder of a fine-tuning run (WORKDIR/TASK/seed-N), or a Hugging Face folder of a model
        for sequence classification, token classification or question answering.
      texts: number of texts per row, for a folder that does not define it; None assumes one.

    Returns:
      (config, parameters on the host, tokenizer).

    Raises:
      ConfigError: the model is not fine-tuned, the folder holds several models, or `texts` differs
        from the model.
      ConversionError, CheckpointError: the model cannot be read.
    """
    workdir = Workdir(path)
    if workdir.holds_run():
        config = workdir.read_config()
        if config.recipe != "finetune":
            raise ConfigError(
                f"a {config.recipe} run cannot predict labels. Fine-tune it first "
                f"(--config.init_from={path}).",
                path=path,
            )
        _check_texts(path, config, texts)
        _, params = sources.read_params(workdir, config)
        return config, params, read_tokenizer(workdir, config)[0]
    refuse_several(path)
    return from_source(path, sources.read_source(path), texts)


def refuse_several(path: str) -> None:
    """Raises ConfigError if `path` is the workdir of fine-tuning instead of one of its models."""
    if inside := Workdir(path).models():
        problem = f"{path} holds {len(inside)} models. Use one of them, as {inside[0]}."
        raise ConfigError(problem, path=path)


def _check_texts(path: str, config: Config, texts: int | None) -> None:
    if texts not in (None, config.outputs.texts):
        known = ", ".join(config.outputs.columns)
        raise ConfigError(
            f"(the number of --texts columns) does not match {path}, which reads "
            f"{config.outputs.texts} per row{f' ({known})' if known else ''}. Pass as many.",
            field="texts",
            value=texts,
            path=path,
        )
    if config.outputs.texts > 1 and config.model.types == 1:
        raise ConfigError(f"{path} has one segment type and cannot read pairs of texts.", path=path)


def _says_texts(path: str) -> bool:
    """Whether the model defines the number of texts per row."""
    if Workdir(path).holds_run():
        return True
    return "outputs.texts" in sources.read_source(path).networks["main"].use


def has_finetuned_head(source: sources.Source) -> bool:
    """Whether the weights have a head of a fine-tuned model."""
    return any(source.networks["main"].has(head) for head in _KINDS)


def from_source(
    path: str, source: sources.Source, texts: int | None = None
) -> tuple[Config, Any, Tokenizer]:
    """Implements `read_finetuned` for weights of other libraries.

    Args:
      path: path of the source, for names and messages.
    """
    main = source.networks["main"]
    heads = [head for head in _KINDS if main.has(head)]
    if not heads:
        raise ConfigError(f"{path} has no head for labels. Fine-tune it first.", path=path)
    if source.not_read and not source.tokenizer:
        raise ConfigError(
            f"{source.not_read}. To use BERT's tokenization instead, copy config.json, the weights "
            "and vocab.txt to another folder and use that."
        )
    if not source.tokenizer:
        raise ConfigError(f"{path} has no vocabulary. Copy it to this folder.", path=path)
    tokenizer, section = sources.open_vocabulary(path, source)
    start = Config(name=Path(path).name, recipe="finetune", tokenizer=section)
    config = matching.replace(start, matching.derive_fields({"main": main}, start))
    config = dataclasses.replace(config, outputs=_describe_outputs(path, main, heads[0], texts))
    _check_texts(path, config, texts)
    config = matching.replace(config, _finetune_fields(config, main, heads[0]))
    _tell_assumed(path, config, main)
    return config, join(config, {"main": main})[0], tokenizer


def _finetune_fields(config: Config, network: Network, head: str) -> dict[str, Any]:
    """Returns row lengths from the model's config.json, or defaults."""
    f = config.finetune
    buckets = () if config.encoder.reads_padding else f.buckets
    length = _SPAN_LENGTH if head == "span_head" else f.length
    told = {path: value for path, value in network.use.items() if path.startswith("finetune.")}
    fields = {"finetune.length": length, "finetune.buckets": buckets} | told
    length = fields["finetune.length"] = min(fields["finetune.length"], config.model.positions)
    if head == "span_head":  # leave half of a short row for the context
        fields.setdefault("finetune.query_length", min(f.query_length, length // 2))
    return fields


def _tell_assumed(path: str, config: Config, network: Network) -> None:
    """Logs the assumptions about a folder that does not define texts, length or padding."""
    outputs, length = config.outputs, config.finetune.length
    if outputs.head == "sequence" and "outputs.texts" not in network.use:
        logging.warning(
            "%s does not define the number and length of its texts; assuming %d of up to %d "
            "tokens. To change this, pass the columns to --mode=predict, as "
            '--texts=FIRST,SECOND, or add {"convbert_jax": {"use": {"outputs.texts": 2, '
            '"finetune.length": %d}}} to its config.json.',
            path,
            outputs.texts,
            length,
            length,
        )
    elif "finetune.length" not in network.use:
        logging.warning(
            "%s does not define the length of its texts; assuming windows of %d tokens. To change "
            'this, add {"convbert_jax": {"use": {"finetune.length": %d}}} to its config.json.',
            path,
            length,
            config.model.positions,
        )
    if config.encoder.reads_padding and "finetune.length" not in network.use:
        logging.warning(
            "%s reads padding: its predictions are computed on texts padded to %d tokens and "
            "differ from those on unpadded texts, as encode() uses.",
            path,
            length,
        )


def _describe_outputs(path: str, network: Network, head: str, texts: int | None) -> OutputsSection:
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
            f"{path} is a model for {outputs.kind} with a {name} head, which is not supported. "
            "Supported are classification, regression, tagging and question answering.",
            path=path,
        )
    if outputs.kind == "regression" and len(labels) != 1:
        raise ConfigError(
            f"{path} predicts {len(labels)} numbers per text. Only one is supported.", path=path
        )
    return outputs


def open_teacher(path: str) -> "Teacher":
    """Opens the model of `config.finetune.distill_from`.

    Raises:
      ConfigError: the model is not fine-tuned, or not for classification or regression.
    """
    config, params, tokenizer = read_finetuned(path)
    if config.outputs.kind not in ("classification", "regression"):
        raise ConfigError(
            f"is a model for {config.outputs.kind}. A teacher must be a model for classification "
            "or regression.",
            field="config.finetune.distill_from",
            value=path,
        )
    dtype = environment.compute_dtype(config, jax.devices()[0])
    return Teacher(
        path, Predictor(config, params, tokenizer, dtype), run_files.checksum_weights(params)
    )


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A fine-tuned model that provides logits for distillation."""

    path: str
    predictor: Predictor
    checksum: str  # of its weights

    def for_task(self, task: LabelledTask) -> classification.Teacher:
        """Returns the teacher function of a task: texts -> logits [N, labels].

        For regression the outputs are [N, 1], divided by the scale of the task.

        Raises:
          FinetuningError: kind, labels or number of texts differ from the task.
        """
        theirs = self.predictor.outputs
        names = task.labels or theirs.labels
        unnamed = all(label.startswith(_UNNAMED) for label in theirs.labels)
        same = len(names) == len(theirs.labels) if unnamed else set(names) == set(theirs.labels)
        if theirs.kind != task.kind or not same:
            raise FinetuningError(
                f"is for {theirs.kind} with the labels {', '.join(theirs.labels)}, but "
                f"{task.name} is {task.kind} with {', '.join(names)}. Use a teacher of this task.",
                field="config.finetune.distill_from",
                value=self.path,
            )
        if theirs.texts != task.texts and _says_texts(self.path):
            raise FinetuningError(
                f"reads {theirs.texts} texts per row, but {task.name} has "
                f"{task.texts}. Use a teacher of this task.",
                field="config.finetune.distill_from",
                value=self.path,
            )
        order = range(len(names)) if unnamed else [theirs.labels.index(name) for name in names]

        def teach(texts: Sequence[tuple[str, ...]]) -> np.ndarray:
            logging.info("%s: predicting %d texts by teacher %s.", task.name, len(texts), self.path)
            # One device per process: the mesh of the run would shard rows over devices of other
            # processes.
            with jax.set_mesh(partitioning.make_mesh(MeshSection(data=1), jax.local_devices()[:1])):
                found = self.predictor.predict([Example("", text, None) for text in texts])
            if task.kind == "regression":
                return found[:, None] / task.scale
            return found[:, list(order)]

        return classification.Teacher(teach, self.checksum)


def load(
    path: str,
    *,
    step: int | None = None,
    vocabulary: str | None = None,
    texts: int | None = None,
    dtype: str | None = None,
    average: int | None = None,
) -> Model | TextModel:
    """Implements `convbert_jax.load`."""
    if texts not in (None, 1, 2):
        raise ModelError("must be 1 or 2 (texts per row).", field="texts", value=texts)
    workdir = Workdir(path)
    try:
        is_run = workdir.holds_run()
    except OSError as error:  # name too long, permission denied
        raise ModelError(f"{shorten(path)} cannot be read: {error.strerror}.") from None
    if is_run:
        if vocabulary or texts:
            raise ModelError(f"{path} is a run; leave out `vocabulary` and `texts`.", path=path)
        return _load_run(path, workdir, step, dtype, average)
    for field, value in (("average", average), ("step", step)):
        if value is not None:
            problem = f"is only supported for runs; {path} is not a run."
            raise ModelError(problem, field=field, value=value, path=path)
    refuse_several(path)
    return _load_source(path, vocabulary, texts, dtype)


def _load_run(
    path: str, workdir: Workdir, step: int | None, dtype: str | None, average: int | None
) -> Model | TextModel:
    config = matching.for_any_machine(workdir.read_config_at(step), path)
    environment.enable_compile_cache(Config().train.compile_cache)
    step = workdir.choose_step(step)
    if config.spec.generates:
        if average is not None:
            config = change_decoding(config, {"average": average})
        return TextModel(path, config, step, dtype=_choose_dtype(config, dtype))
    (*_, step), params = sources.read_mean(workdir, config, average or 1, step)
    is_finetuned = config.recipe == "finetune"
    length = operator.attrgetter(config.spec.length)(config)
    return Model(
        path,
        config,
        split(config, params),
        read_tokenizer(workdir, config)[0],
        step=step,
        length=length,
        dtype=_choose_dtype(config, dtype),
        finetuned_params=params if is_finetuned else None,
        vectors=sentence_transformers.of_run(config),
    )


def _load_source(path: str, vocabulary: str | None, texts: int | None, dtype: str | None) -> Model:
    source = sources.read_source(path)
    if vocabulary:
        section = follow_file(dataclasses.replace(Config().tokenizer, path=vocabulary))
        source = dataclasses.replace(source, tokenizer=dataclasses.asdict(section))
    if source.not_read and not source.tokenizer:
        raise ModelError(
            f"{source.not_read}. To use BERT's tokenization instead, call "
            f"load({path!r}, vocabulary='vocab.txt')."
        )
    if not source.tokenizer:
        raise ModelError(
            f"{path} has no vocabulary. Copy its vocab.txt to this folder, or call "
            f"load({path!r}, vocabulary='vocab.txt').",
            path=path,
        )
    environment.enable_compile_cache(Config().train.compile_cache)
    config, params, length = Config(), None, source.networks["main"].embeddings.positions
    if has_finetuned_head(source):
        config, params, tokenizer = from_source(path, source, texts)
        length = config.finetune.length
    else:
        tokenizer, section = sources.open_vocabulary(path, source)
        config = dataclasses.replace(config, tokenizer=section)
    vectors = sources.read_vectors(path, source)
    if vectors and vectors.length:
        length = min(length, vectors.length)
    return Model(
        path,
        config,
        source.networks,
        tokenizer,
        step=source.step,
        length=length,
        dtype=_choose_dtype(config, dtype),
        finetuned_params=params,
        vectors=vectors,
    )


def _choose_dtype(config: Config, dtype: str | None) -> jnp.dtype:
    if dtype not in (None, "float32", "bfloat16"):
        raise ModelError("must be 'float32' or 'bfloat16'.", field="dtype", value=dtype)
    device = environment.find_devices(config)[0]
    return environment.compute_dtype(dataclasses.replace(config, compute_dtype=dtype) if dtype else
                                 config, device)  # fmt: skip
