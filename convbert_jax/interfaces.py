"""Types shared by the packages: batches, special token ids, partition rules and evaluators.

At run time a batch is a plain dict of arrays. It is therefore a pytree for `jax.jit`, `vmap` and
`shard_map`, can be saved with `np.savez(**batch)` if its loss is not finite, and may have
task-specific fields. These classes document the fields: a function is annotated with the class
whose fields it reads, and tests check the producers.

Host arrays are numpy arrays with the rows of this process; device arrays have the rows of all
processes, sharded by row. Axes: B rows, L tokens per row, W logits of the compiled head (at least
the number of labels).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

from jaxtyping import Bool, Float32, Int32


class Batch(TypedDict):
    """Token ids: the input of every model, and the complete batch of most pre-training.

    Made by `data.batching` (pre-training) and `data.tasks.labelled_text.Rows` (fine-tuning).

    Attributes:
      tokens: token ids; [PAD] after the end of a row.
      segment_ids: 0 on padding; 1, 2, ... on the documents of a packed row, 1 in other rows. They
        are the only mask: models never mix tokens of different segments.
      type_ids: 1 in the second text of a pair and the [SEP] after it, 0 elsewhere.
    """

    tokens: Int32[Any, "B L"]
    segment_ids: Int32[Any, "B L"]
    type_ids: Int32[Any, "B L"]


class PairBatch(Batch):
    """Rows of two texts, from the layout "pairs". Made by `data.batching`.

    Attributes:
      pair_label: 0 if the second text follows the first, 1 if it does not, -1 if the row has no
        labeled pair.
    """

    pair_label: Int32[Any, " B"]


class LanguageBatch(TypedDict):
    """Inputs and labels of a decoder. Axes: B rows, T tokens.

    Made by `objectives.next_tokens.shift`.

    Attributes:
      tokens: decoder inputs: [CLS], then the token before each label.
      segment_ids: 0 on padding, whose labels are ignored; 1, 2, ... on documents.
      labels: decoder targets, with [SEP] at the end; [PAD] on padding.
    """

    tokens: Int32[Any, "B T"]
    segment_ids: Int32[Any, "B T"]
    labels: Int32[Any, "B T"]


class SequenceBatch(LanguageBatch):
    """Sources and targets of an encoder-decoder. Axes: S tokens of the source.

    Made by `data.batching` and `objectives.span_corruption.corrupt`.

    Attributes:
      source: encoder inputs, with [SEP] at the end.
      source_ids: segment ids of the source, 0 on padding; rows of padding complete a batch.
    """

    source: Int32[Any, "B S"]
    source_ids: Int32[Any, "B S"]


class TextPairBatch(TypedDict):
    """Pairs of texts as rows of an encoder: [CLS] text [SEP]. Axes: S, T tokens of the texts.

    Made by `data.batching`.

    Attributes:
      source: first texts.
      source_ids: segment ids of the first texts, 0 on padding; rows of padding complete a batch.
      tokens: second texts.
      segment_ids: segment ids of the second texts.
      negatives: hard negatives, texts that do not belong to the first texts.
      negative_ids: segment ids of the hard negatives.
      score: similarities of the texts.
    """

    source: Int32[Any, "B S"]
    source_ids: Int32[Any, "B S"]
    tokens: Int32[Any, "B T"]
    segment_ids: Int32[Any, "B T"]
    negatives: NotRequired[Int32[Any, "B T"]]
    negative_ids: NotRequired[Int32[Any, "B T"]]
    score: NotRequired[Float32[Any, " B"]]


# Fields of the tokens and of the segment ids of each text of a `TextPairBatch`.
TEXTS_OF_PAIR = (("source", "source_ids"), ("tokens", "segment_ids"), ("negatives", "negative_ids"))


class FinetuneBatch(Batch):
    """Rows of a fine-tuning task. `Rows.batch` adds the weight.

    Attributes:
      weight: weight of each row in the loss; 0 for rows that pad the batch.
    """

    weight: Float32[Any, " B"]


class LogitsBatch(FinetuneBatch):
    """Meaning of the logits, the same for all rows and therefore without axis B.

    Tasks with few labels share a compiled function with more logits than labels. Made by
    `finetuning.classification.constants_of`.

    Attributes:
      outputs: True for the logits that the task uses.
      is_regression: whether the first logit is a predicted value.
    """

    outputs: Bool[Any, " W"]
    is_regression: Bool[Any, ""]


class TextBatch(LogitsBatch):
    """Classification and regression. Made by `finetuning.classification.encode_examples`.

    Attributes:
      label: index of the class; 0 for regression or without labels.
      value: regression target in the unit of the logit; 0 for classification or without labels.
      teacher: logits of the teacher, for distillation.
      temperature: softmax temperature of student and teacher, the same for all rows.
      teacher_weight: weight of the distillation loss, the same for all rows.
    """

    label: Int32[Any, " B"]
    value: Float32[Any, " B"]
    teacher: NotRequired[Float32[Any, "B W"]]
    temperature: NotRequired[Float32[Any, ""]]
    teacher_weight: NotRequired[Float32[Any, ""]]


class TagBatch(LogitsBatch):
    """Token classification. Made by `data.tasks.labelled_text.encode_words`.

    Attributes:
      tags: class of the word that begins at a token; negative at other tokens or without labels.
      words: index of that word in its sentence, or negative; read by the host only.
    """

    tags: Int32[Any, "B L"]
    words: Int32[Any, "B L"]


class AnswerBatch(FinetuneBatch):
    """Windows of question answering; type 1 marks the context and the final [SEP].

    Made by `data.tasks.squad.to_rows`: `best` for prediction, the others for training.

    Attributes:
      start: position of the first token of the answer; 0 if the window does not contain it.
      end: position of the last token of the answer; 0 likewise.
      impossible: 1 if the question has no answer.
      best: tokens for which this window has the most context of all windows.
    """

    start: NotRequired[Int32[Any, " B"]]
    end: NotRequired[Int32[Any, " B"]]
    impossible: NotRequired[Int32[Any, " B"]]
    best: NotRequired[Bool[Any, "B L"]]


# Sentinels, which replace removed spans, as named by this package and by T5.
SENTINEL = re.compile(r"(?:\[SPAN_(\d+)\]|<extra_id_(\d+)>)")


def sentinel_names(count: int) -> list[str]:
    """Returns the vocabulary entries of `count` sentinels."""
    return [f"[SPAN_{number}]" for number in range(count)]


@dataclasses.dataclass(frozen=True)
class SpecialIds:
    """Ids of the special tokens of one vocabulary.

    Attributes:
      pad: [PAD], after the end of a row.
      unknown: [UNK], text that the vocabulary cannot encode; may be masked like other text.
      cls: [CLS], at the beginning of a row, of a piece of a packed row, and of decoder inputs.
      sep: [SEP], at the end of a text, including decoder targets.
      mask: [MASK], replaces a masked token.
      extra: name -> id of additional special tokens, for example sentinels.
    """

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int
    extra: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def by_name(self) -> dict[str, int]:
        """All special ids by name: the five fields, then `extra`."""
        five = (field.name for field in dataclasses.fields(self) if field.name != "extra")
        return {name: getattr(self, name) for name in five} | dict(self.extra)

    @property
    def sentinels(self) -> tuple[int, ...]:
        """Ids of the sentinels of the first, second, ... removed span; () without sentinels."""
        found = {name: SENTINEL.fullmatch(name) for name in self.extra}
        number = {name: int(match[1] or match[2]) for name, match in found.items() if match}
        return tuple(self.extra[name] for name in sorted(number, key=number.get))

    @property
    def never_hidden(self) -> tuple[int, ...]:
        """Ids that no objective masks; padding is recognized by its segment id."""
        return self.cls, self.sep, self.mask, *self.extra.values()


@dataclasses.dataclass(frozen=True)
class Split:
    """Partitioning of one parameter.

    The fsdp axis shards the largest dimension that it divides, except `tensor`. It shards a `table`
    by rows or not at all, because sharded columns would require communication of activations.

    Attributes:
      tensor: dimension (negative) that the tensor axis shards; None: no dimension.
      table: whether the parameter is an embedding table, whose rows are looked up.
    """

    tensor: int | None = None
    table: bool = False


REPLICATED = None  # a full copy on every device

# (regular expression for parameter paths, partitioning); the first match applies.
Rules = Sequence[tuple[str, Split | None]]

State = TypeVar("State")

Outputs = Mapping[str, Any]  # name -> numpy arrays, of one batch


@dataclasses.dataclass(frozen=True)
class Evaluator(Generic[State]):
    """Metrics of a set of rows, as three host functions.

    The evaluator and the function that computes the outputs agree on their names. Outputs contain
    the global batch, so all processes compute the same metrics. Rows that pad a batch are marked in
    the outputs (weight 0 or a negative index).

    Attributes:
      names: names of the metrics.
      init: () -> initial state.
      update: (state, outputs of one batch) -> new state; may modify its argument.
      finish: state -> {name: value} for all `names`; NaN if nothing was counted. Does not modify
        the state, so that updates may follow.
    """

    names: tuple[str, ...]
    init: Callable[[], State]
    update: Callable[[State, Outputs], State]
    finish: Callable[[State], dict[str, float]]
