"""Sections of generative models: decoder, pairs of texts, and generation."""

import dataclasses
import re
from typing import Annotated, Literal

from convbert_jax.config.fields import (
    INT32,
    Changeable,
    ChangeableInPretraining,
    CountOrAll,
    Encoding,
    Fraction,
    FractionBelow1,
    PositiveFraction,
    Range,
    Temperature,
)

_NAMED_SOURCE = re.compile(r"([\w.-]+)=([a-z]+:.+)")


@dataclasses.dataclass(frozen=True)
class SequenceSection:
    """Decoder settings. config.model describes the encoder and provides the decoder's defaults; for
    a decoder-only model it describes the decoder.
    """

    # 0: config.model.layers
    decoder_layers: Annotated[int, Range(0, 1_024, note="0 is as many as the encoder")] = 0
    decoder_mixer: str = ""  # "": mixer and mixer_fields of config.model
    decoder_mixer_fields: tuple[str, ...] = ()  # of decoder_mixer
    # kernel size of each decoder layer; (): all layers use config.model.kernel_size
    decoder_kernel_sizes: Annotated[tuple[int, ...], Range(1, 1_024)] = ()
    decoder_dilations: Annotated[tuple[int, ...], Range(1, 1_024)] = ()  # the same for dilations
    # final norm of a pre-norm decoder; without it logits are computed from unnormalized states, as
    # in LightConv's language models
    last_norm: bool = True
    shared_vocabulary: bool = True  # one vocabulary and embedding table for source and target
    tied_output: bool = True  # the output projection is the target's embedding table


@dataclasses.dataclass(frozen=True)
class ParallelSection:
    """Pairs of texts for the recipes translation, summarization, text_to_text and embedding.
    config.data.workers and config.data.prefetch apply.
    """

    # training pairs: parallel:FILE,FILE (with equal line counts) | tsv:FILE | csv:FILE | jsonl:FILE
    # (optionally .gz) | parquet:GLOB | tfds:DIR (or tfds:DIR#SPLIT)
    source: str = ""
    # evaluation pairs; "" holds out pairs of `source`. They may have several references; the first
    # is the target, and outputs are scored against all: parallel:FILE,FILE,FILE…, further
    # `columns`, or a list of texts in jsonl, parquet and TFDS
    validation_source: str = ""
    # random weights, with sizes and vocabulary of init_from, to measure the value of pre-training
    from_scratch: bool = False
    heldout_fraction: FractionBelow1 = 0.01  # of the pairs, selected by a hash of their texts
    # columns of source and target, then of further references, which are not used in training; for
    # embedding a third column is a hard negative, a text that does not belong to the first. Names,
    # or numbers from 0 for a tsv or csv without a header. translation.en is the field en of
    # translation in jsonl, parquet and TFDS. (): 0,1 of a tsv, else source,target
    columns: tuple[str, ...] = ()
    # for embedding: column with the similarity of the two texts, a number on any scale; "": pairs
    # belong together
    score_column: str = ""
    # for embedding: what stands before each first text, and before the other texts, followed by a
    # space, as query:,passage: for E5; (): nothing
    prompts: tuple[str, ...] = ()
    encoding: Encoding = "utf-8"  # of text, csv, tsv and jsonl files, e.g. cp1252 or gbk
    # with config.sequence.shared_vocabulary=False: size of the target vocabulary (config.tokenizer
    # describes the source vocabulary); 0 is tokenizer.vocab_size
    target_vocab_size: Annotated[int, Range(0, 2**24, note="0 is tokenizer.vocab_size")] = 0
    # file of the target vocabulary, see tokenizer.path; "" trains one
    target_vocabulary: ChangeableInPretraining[str] = ""
    # maximum tokens of a text, including the end token; for embedding also [CLS]
    max_length: Annotated[int, Range(2, 2**14, note="a token and the end token")] = 256
    # truncate longer sources and log their number, as for documents in T5 and BART; False: they are
    # bad pairs. Longer targets are always bad pairs; for embedding all texts are truncated
    cut_sources: bool = False
    # maximum ratio of the tokens of the longer and the shorter text; 0: no limit. LightConv: 1.5
    max_ratio: Annotated[float, Range(0.0, 1e6, note="0 is any")] = 0.0
    # empty, too long, unreadable or beyond max_ratio: skip | error
    bad_pairs: Literal["skip", "error"] = "skip"
    # subword regularization (Kudo 2018): each epoch samples one of the 64 best segmentations of a
    # unigram vocabulary, by probability to this power; 0 is off. Kudo: 0.1 to 0.5
    sampling: Fraction = 0.0
    # rows of a batch times the length of its longer side, padding included
    batch_tokens: Annotated[int, Range(2, INT32)] = 4_096
    # maximum number of batch shapes, each compiled once
    shapes: Annotated[int, Range(1, 1_024)] = 8
    # padded lengths are multiples of this: 8 suits TPUs, 1 minimizes padding
    length_multiple: Annotated[int, Range(1, 1_024)] = 8


@dataclasses.dataclass(frozen=True)
class PairFormat:
    """Rows of a parallel text, as a recipe reads them.

    Attributes:
      texts: number of texts: 2, or 3 with a hard negative.
      scored: whether a number follows the texts.
      encoder: whether each text is [CLS] text [SEP]; else it is text [SEP].
    """

    texts: int = 2
    scored: bool = False
    encoder: bool = False

    @property
    def added_tokens(self) -> int:
        """Number of special tokens of each text."""
        return 2 if self.encoder else 1


@dataclasses.dataclass(frozen=True)
class DecodingSection:
    """Text generation in evaluations and --mode=predict. Has no effect on training."""

    # beam | greedy | sample
    method: Changeable[Literal["beam", "greedy", "sample"]] = "beam"
    beam: Changeable[Annotated[int, Range(1, 1_024)]] = 4
    # log probabilities are divided by the number of tokens to this power, as in fairseq: 0 prefers
    # short texts, 1 is the mean. LightConv: 1 (IWSLT), 0.5 (WMT)
    length_penalty: Changeable[Annotated[float, Range(0.0, 100.0)]] = 1.0
    # maximum output tokens: length_ratio times the source tokens, plus length_extra. fairseq: 0 and
    # 200; LightConv on IWSLT: 1.2 and 10
    length_ratio: Changeable[Annotated[float, Range(0.0, 1e3)]] = 1.5
    length_extra: Changeable[Annotated[int, Range(0, 2**14)]] = 10
    # outputs per source of --mode=predict, the most probable first: at most beam, or the number of
    # samples
    n_best: Changeable[Annotated[int, Range(1, 1_024)]] = 1
    # for sample: 1 is the model's distribution, lower values sharpen it
    temperature: Changeable[Temperature] = 1.0
    # for sample: number of most probable tokens to sample from; 0: all
    top_k: Changeable[CountOrAll] = 0
    top_p: Changeable[PositiveFraction] = 1.0  # for sample: nucleus with this probability mass
    # source tokens per decoding batch
    batch_tokens: Changeable[Annotated[int, Range(2, INT32)]] = 4_096
    # number of newest checkpoints to average; LightConv: 10
    average: Changeable[Annotated[int, Range(1, 1_024)]] = 1
    # word tokenizer of BLEU and ROUGE, by sacreBLEU's names: 13a | intl | zh | char | none. 13a
    # cannot split languages written without blanks; for ROUGE it is the tokenizer of rouge-score,
    # which stems words of a to z and 0 to 9 and drops all other characters
    score_words: Changeable[Literal["13a", "intl", "zh", "char", "none"]] = "13a"
    # further test sets for --mode=eval: NAME=SOURCE, with SOURCE as parallel.validation_source
    test_sources: Changeable[tuple[str, ...]] = ()

    @property
    def tests(self) -> tuple[tuple[str, str], ...]:
        """(name, source) of each test set; the name is "" if missing.

        A command line splits `test_sources` at commas, so sources with two files are rejoined.
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
