"""The section of parallel text: pairs of a source and a target, and the batches made of them."""

import dataclasses

BAD_PAIRS = ("skip", "error")


@dataclasses.dataclass(frozen=True)
class ParallelSection:
    """Pairs of texts, read by data/parallel/; how many processes prepare them and how many batches
    are read ahead is as config.data says.
    """

    # to train on: parallel:FILE,FILE (of equal line count) | tsv:FILE | jsonl:FILE (.gz or not) |
    # tfds:DIR (or tfds:DIR#SPLIT)
    source: str = ""
    validation_source: str = ""  # pairs to evaluate on; "" holds out some of `source`
    heldout_fraction: float = 0.01  # of the pairs, chosen by a hash of their texts
    # the two texts: numbers from 0 of a tsv, or names, which its first line then has; names of
    # jsonl and TFDS. (): 0,1 of a tsv, source,target of jsonl and TFDS
    columns: tuple[str, ...] = ()
    # one vocabulary, config.tokenizer, of both texts; False: that one is the source's
    shared_vocabulary: bool = True
    target_vocab_size: int = 0  # of the target's own; 0 is tokenizer.vocab_size
    target_vocabulary: str = ""  # its file, see tokenizer.path; "" trains one
    max_length: int = 256  # most tokens of a text, the end mark included
    # most tokens of the longer text for each of the shorter; 0 is any. LightConv's sets: 1.5
    max_ratio: float = 0.0
    bad_pairs: str = "skip"  # empty, over-long, unreadable or uneven ones: skip | error
    # subword regularization (Kudo 2018): texts are cut anew in each epoch, unigram pieces by their
    # probability to this power, of BPE merges are left out at this rate; 0 is off. Kudo: 0.1 to 0.5
    sampling: float = 0.0
    # rows of a batch times its longer text, padding included
    batch_tokens: int = 4_096
    shapes: int = 8  # most shapes of batches, each compiled once
    # padded lengths are multiples of it: 8 suits TPUs, 1 pads least
    length_multiple: int = 8
