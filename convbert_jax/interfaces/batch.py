"""Batches: the fields that data pipelines produce and models read.

At run time a batch is a plain dict of arrays. It is therefore a pytree for `jax.jit`, `vmap` and
`shard_map`, can be saved with `np.savez(**batch)` if its loss is not finite, and may have
task-specific fields. These classes document the fields: a function is annotated with the class
whose fields it reads, and tests check the producers.

Host arrays are numpy arrays with the rows of this process; device arrays have the rows of all
processes, sharded by row. Axes: B rows, L tokens per row, W logits of the compiled head (at least
the number of labels).
"""

from typing import Any, NotRequired, TypedDict

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
