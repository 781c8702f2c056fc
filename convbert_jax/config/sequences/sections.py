"""What a user sets of a model that writes text, beside config.model: the model, its pairs, how it
writes.
"""

import dataclasses
import re

from convbert_jax.config.changes import Changeable, ChangeableInPretraining

NORMS = ("post", "pre")
NORMALIZATIONS = ("layer", "rms")
ACTIVATIONS = ("relu", "gelu", "gated_gelu")
POSITIONS = ("sinusoidal", "learned", "none")
BAD_PAIRS = ("skip", "error")
SCORE_WORDS = ("13a", "intl", "zh", "char", "none")
METHODS = ("beam", "greedy", "sample")
# Recipes whose model writes text: of a corpus, and of pairs of texts.
OF_CORPUS = ("causal_lm", "span_corruption")
OF_PAIRS = ("translation", "summarization", "text_to_text")
_NAMED_SOURCE = re.compile(r"([\w.-]+)=([a-z]+:.+)")


@dataclasses.dataclass(frozen=True)
class SequenceSection:
    """Of an encoder-decoder whose encoder config.model describes, and its decoder where nothing
    else is said here; or of a language model, which is one decoder, described by config.model.
    """

    decoder_layers: int = 0  # 0: as many as config.model.layers
    decoder_mixer: str = ""  # "": that of config.model, with its mixer_fields
    decoder_mixer_fields: tuple[str, ...] = ()  # of decoder_mixer
    # taps of each layer of the decoder; (): all have config.model.kernel_size
    decoder_kernel_sizes: tuple[int, ...] = ()
    decoder_dilations: tuple[int, ...] = ()  # the same for dilations
    # post: layer norm behind each residual sum. pre: before each part, and one more at the end;
    # what LightConv's language models need ("not stable" otherwise).
    norm: str = "post"
    # of pre, in the decoder; without it logits are made of what was never normalized, as those of
    # LightConv's language models are
    last_norm: bool = True
    # layer (mean and variance, scale and bias) | rms (root mean square and scale alone: T5)
    normalization: str = "layer"
    # in the feed-forward blocks: relu | gelu | gated_gelu (T5 1.1: GELU, by its tanh, of one dense
    # layer times another)
    activation: str = "relu"
    biases: bool = True  # of feed-forward blocks and of attention to a source; T5 has none
    activation_dropout: float = 0.0  # inside of feed-forward blocks; T5: as config.model.dropout
    last_dropout: float = 0.0  # of pre-norm, behind the last norm; T5: as config.model.dropout
    # sinusoidal, of any length | learned, config.model.positions rows | none, which convolutions
    # do not need (Tay et al. 2021)
    positions: str = "sinusoidal"
    shared_vocabulary: bool = True  # one vocabulary and one table for source and target
    tied_output: bool = True  # the target's table is the output's too


@dataclasses.dataclass(frozen=True)
class ParallelSection:
    """The pairs of texts of the recipes translation, summarization and text_to_text. How many
    processes prepare them and how many batches are read ahead is as config.data says.
    """

    # to train on: parallel:FILE,FILE (of equal line count) | tsv:FILE | csv:FILE | jsonl:FILE (.gz
    # or not) | parquet:GLOB | tfds:DIR (or tfds:DIR#SPLIT)
    source: str = ""
    # pairs to evaluate on; "" holds out some of `source`. They may have several references, all of
    # which texts are scored by, the first one is the target: parallel:FILE,FILE,FILE…, further
    # `columns`, or a list of texts in jsonl, parquet and TFDS
    validation_source: str = ""
    # weights are random, only sizes and vocabulary are those of init_from: what pre-training is
    # worth
    from_scratch: bool = False
    heldout_fraction: float = 0.01  # of the pairs, chosen by a hash of their texts
    # columns of the two texts, then those of further references, which training does not read.
    # Names; numbers from 0 for a tsv or csv without a first line of names. translation.en is the
    # field en of translation in jsonl, parquet and TFDS. (): 0,1 of a tsv, else source,target
    columns: tuple[str, ...] = ()
    encoding: str = "utf-8"  # of text, csv, tsv and jsonl files, e.g. cp1252 or gbk
    # where config.sequence.shared_vocabulary=False, config.tokenizer is the source's vocabulary and
    # this the size of the target's own; 0 is tokenizer.vocab_size
    target_vocab_size: int = 0
    # its file, see tokenizer.path; "" trains one
    target_vocabulary: ChangeableInPretraining[str] = ""
    max_length: int = 256  # most tokens of a text, the end mark included
    # a source of more tokens is cut to them, with a count in the log, as recipes of T5 and BART cut
    # documents; False: it is a bad pair. A target of more is a bad pair always
    cut_sources: bool = False
    # most tokens of the longer text for each of the shorter; 0 is any. LightConv's sets: 1.5
    max_ratio: float = 0.0
    bad_pairs: str = "skip"  # empty, over-long, unreadable or uneven ones: skip | error
    # subword regularization (Kudo 2018): texts are cut anew in each epoch, one of the 64 best ways
    # of a unigram vocabulary by its probability to this power; 0 is off. Kudo: 0.1 to 0.5
    sampling: float = 0.0
    # rows of a batch times its longer text, padding included
    batch_tokens: int = 4_096
    shapes: int = 8  # most shapes of batches, each compiled once
    # padded lengths are multiples of it: 8 suits TPUs, 1 pads least
    length_multiple: int = 8


@dataclasses.dataclass(frozen=True)
class DecodingSection:
    """How a model writes: texts that it is scored by, and --mode=predict. No field changes what is
    learned.
    """

    # beam | greedy | sample, from the model's own distribution
    method: Changeable[str] = "beam"
    beam: Changeable[int] = 4
    # a text's log probability is divided by its tokens to this power, as in fairseq: 0 prefers
    # short texts, 1 is the mean. LightConv: 1 (IWSLT), 0.5 (WMT)
    length_penalty: Changeable[float] = 1.0
    # most tokens of a text: so many for each of the source's and so many more. fairseq: 0 and 200;
    # LightConv on IWSLT: 1.2 and 10
    length_ratio: Changeable[float] = 1.5
    length_extra: Changeable[int] = 10
    # texts of a source that --mode=predict writes, the most probable first: of a beam, at most as
    # many as that; of sample so many draws
    n_best: Changeable[int] = 1
    # of sample: 1 is the model's distribution, less prefers what is probable anyway
    temperature: Changeable[float] = 1.0
    top_k: Changeable[int] = 0  # of sample: draw from so many most probable; 0 is all
    top_p: Changeable[float] = 1.0  # of sample: and from the fewest that have this probability
    batch_tokens: Changeable[int] = 4_096  # of the sources that are decoded together
    average: Changeable[int] = 1  # newest checkpoints whose mean is taken; LightConv: 10
    # how BLEU and ROUGE cut texts into words, by sacreBLEU's names: 13a | intl | zh | char | none.
    # 13a knows no words of languages that are written without blanks; for ROUGE it is the way of
    # rouge-score, stems of words of a to z and 0 to 9, and all else is nothing
    score_words: Changeable[str] = "13a"
    # further sets of pairs that --mode=eval scores, each NAME=SOURCE as parallel.validation_source
    # has it
    test_sources: Changeable[tuple[str, ...]] = ()

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        """(name, source) of each of `test_sources`, of which a command line cuts those of two files
        in two at their comma; the name is "" where there is none.
        """
        found: list[tuple[str, str]] = []
        for part in self.test_sources:
            named = _NAMED_SOURCE.fullmatch(part)
            if not named and found:
                name, source = found.pop()
                found.append((name, f"{source},{part}"))
            else:
                found.append((named[1], named[2]) if named else ("", part))
        return tuple(found)
