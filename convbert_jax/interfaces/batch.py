"""The batch: what flows from data to models.

At run time it is a plain dict of arrays, so that it is a pytree to `jax.jit`, `vmap` and
`shard_map`, goes to `np.savez(**batch)` when its loss was not finite, and may have fields that only
one task knows. These classes say what the fields are; a function that takes a batch names the class
with those it reads, and makers are held to it in the tests.

On the host arrays are numpy's, and of the rows of this process; on devices they are those of all
processes, divided over the devices by rows. Axes: B rows, L tokens of a row, W logits of the head
as it is compiled, at least the task's labels.
"""

from typing import Any, NotRequired, TypedDict

from jaxtyping import Bool, Float32, Int32


class Batch(TypedDict):
    """Token ids, as every model reads them. All that most pre-training has.

    Made by `data.corpus.batching` (pre-training) and `data.tasks.encoding.Rows` (fine-tuning).

    Attributes:
      tokens: ids of the vocabulary, [PAD] behind the end of a row.
      segment_ids: 0 on padding; 1, 2, ... on the documents of a packed row, 1 on all tokens of any
        other. The only mask there is: nothing reads padding or another document.
      type_ids: 1 in the second text of a pair and the [SEP] behind it, 0 elsewhere.
    """

    tokens: Int32[Any, "B L"]
    segment_ids: Int32[Any, "B L"]
    type_ids: Int32[Any, "B L"]


class PairBatch(Batch):
    """Rows of two texts, of the layout "pairs". Made by `data.corpus.batching`.

    Attributes:
      pair_label: 0 where the second text follows the first, 1 where it does not, -1 where a row has
        no pair to judge.
    """

    pair_label: Int32[Any, " B"]


class LanguageBatch(TypedDict):
    """Text that a decoder writes, each token from those before it. Axes: B rows, T tokens.

    Made by `objectives.next_tokens.shift`.

    Attributes:
      tokens: what the decoder reads: [CLS] first, the token before each label.
      segment_ids: 0 on padding; 1, 2, ... on documents. A label where it is 0 is none.
      labels: what it is to write, [SEP] at the end; [PAD] where there is none.
    """

    tokens: Int32[Any, "B T"]
    segment_ids: Int32[Any, "B T"]
    labels: Int32[Any, "B T"]


class SequenceBatch(LanguageBatch):
    """A text to read and one to write. Made by `data.parallel.batching` and
    `objectives.span_corruption.corrupt`. Axes: S tokens of the source.

    Attributes:
      source: what the encoder reads, [SEP] at the end.
      source_ids: its segment ids, 0 on padding; a row of padding only fills up a batch.
    """

    source: Int32[Any, "B S"]
    source_ids: Int32[Any, "B S"]


class FinetuneBatch(Batch):
    """Rows of a task. `Rows.batch` adds the weight.

    Attributes:
      weight: of a row in the loss; 0 of one that only fills up the batch.
    """

    weight: Float32[Any, " B"]


class LogitsBatch(FinetuneBatch):
    """What the outputs of a head mean: the same for all rows, so without their axis. Tasks of few
    labels share a program of some more logits.

    Made by `finetuning.tasks.classification.constants_of`.

    Attributes:
      outputs: True for the logits that the task has.
      is_regression: the first logit is a number.
    """

    outputs: Bool[Any, " W"]
    is_regression: Bool[Any, ""]


class TextBatch(LogitsBatch):
    """Classification and regression. Made by `finetuning.tasks.classification.encode_examples`.

    Attributes:
      label: index of the class; 0 of a number, or without labels.
      value: the number in the unit of the logit; 0 of a class, or without labels.
      teacher: logits of another model, where one teaches.
      temperature, teacher_weight: that both softmax are taken at, and the teacher's share of the
        loss; the same for all rows.
    """

    label: Int32[Any, " B"]
    value: Float32[Any, " B"]
    teacher: NotRequired[Float32[Any, "B W"]]
    temperature: NotRequired[Float32[Any, ""]]
    teacher_weight: NotRequired[Float32[Any, ""]]


class TagBatch(LogitsBatch):
    """Tagging. Made by `data.tasks.encoding.encode_words`.

    Attributes:
      tags: class of the word that begins at a token; below 0 where none begins, or without labels.
      words: number of that word in its sentence, or below 0; the host reads it, no model does.
    """

    tags: Int32[Any, "B L"]
    words: Int32[Any, "B L"]


class AnswerBatch(FinetuneBatch):
    """Windows over contexts of questions: type 1 is the context and the final [SEP]. Made by
    `data.tasks.squad_windows.to_rows`, the first three to train on, the last one to predict.

    Attributes:
      start, end: places of the answer's first and last token; 0 where the window lacks it.
      impossible: 1 where the question has no answer.
      best: tokens that no other window has more context around.
    """

    start: NotRequired[Int32[Any, " B"]]
    end: NotRequired[Int32[Any, " B"]]
    impossible: NotRequired[Int32[Any, " B"]]
    best: NotRequired[Bool[Any, "B L"]]
