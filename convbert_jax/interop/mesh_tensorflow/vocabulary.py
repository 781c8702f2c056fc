"""T5's vocabulary, a SentencePiece model, as one of as many entries as a checkpoint's table has
rows: T5 puts its sentinels behind the file's pieces, and Mesh TensorFlow fills the table up.
"""

import re

from convbert_jax.interop.networks import ConversionError

SENTINELS = 100  # T5's extra_ids: <extra_id_0> is the last of them
MULTIPLE = 128  # Unitransformer.vocab_divisor, of rows
MASK = "[MASK]"  # which T5 has not; here it is written where a sentinel is to stand
_FIRST = ("<pad>", "</s>", "<unk>")  # ids 0, 1, 2
_SENTINEL = re.compile("\u2581?<extra_id_([0-9]+)>")


def fill_up(content: bytes, rows: int) -> bytes:
    """The model with T5's sentinels and as many unused entries as the table has rows.

    None of them can come out of text; in the table the rows behind the sentinels were never trained
    to be anything, and the first of them is [MASK].

    Args:
      content: of T5's `sentencepiece.model`, with or without its sentinels, or what was made of it.

    Raises:
      ConversionError: it is no SentencePiece model, none of T5's, or of another size.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)
    except DecodeError:
        raise ConversionError("it is no SentencePiece model.") from None
    entries = [piece.piece for piece in model.pieces]
    if tuple(entries[: len(_FIRST)]) != _FIRST:
        raise ConversionError(
            f"its first entries are {', '.join(entries[:3]) or 'none'}, and T5's are "
            f"{', '.join(_FIRST)}; it is another model's."
        )
    there = [number for number, entry in enumerate(entries) if _SENTINEL.fullmatch(entry)]
    text = there[0] if there else len(entries)
    behind = [f"<extra_id_{number}>" for number in reversed(range(SENTINELS))]
    unused = [MASK, *(f"<unused_{number}>" for number in range(rows - text - SENTINELS - 1))]
    found = [entry.lstrip("\u2581") for entry in entries[text:]]
    if found not in ([], behind, behind + unused):
        raise ConversionError(
            f"its sentinels are not its last {SENTINELS} entries, <extra_id_0> at the end, as T5's "
            "are."
        )
    needed = -(-(text + SENTINELS) // MULTIPLE) * MULTIPLE
    if needed != rows or text + SENTINELS == rows:
        raise ConversionError(
            f"its {text} entries and {SENTINELS} sentinels make a table of {needed} rows, with one "
            f"to spare for {MASK}, and the checkpoint has {rows}; it is of another vocabulary."
        )
    del model.pieces[text:]
    for name in behind + unused:
        piece = model.pieces.add(piece=name, score=0.0)
        piece.type = sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL
    if model.trainer_spec.vocab_size:
        model.trainer_spec.vocab_size = rows
    return model.SerializeToString(deterministic=True)
