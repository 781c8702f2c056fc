"""What a run is: frozen dataclasses, checked and derived once, before any long work.

A config file (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `to_config_dict()`, so
that every field can be overridden as `--config.section.field=value`. `from_config_dict()` turns it
into the frozen dataclasses below, and nothing beyond `main.py` and `recipes.py` ever sees a
ConfigDict. Every check raises `ConfigError` with one sentence that names the field, its value and
the fix.

Fields marked "Release:" are the places where the official ConvBERT code does something that a
reader of the paper would not expect; the `paper` variant of each config sets them to the release's
behaviour.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any


class UserError(Exception):
    """Something the user can mend; the message is one sentence that names the thing, its value and
    the fix.

    `main.py` prints the message without a traceback and exits with 1. Each package derives its own
    kind.
    """


class ConfigError(UserError):
    """A config that cannot run."""


# --- What the model code is built from (derived, never written by a user) ---


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """One encoder layer: a token mixer and a feed-forward block, both post-norm."""

    hidden_size: int
    mixer: str  # a key of models/mixers.py MIXERS
    attention_heads: int  # self-attention heads; the mixed block adds as many convolution heads
    head_size: int
    kernel_size: int  # taps of the span-based dynamic convolution
    ffn_size: int
    ffn_groups: int  # contiguous channel groups in both feed-forward matmuls (ConvBERT §3.3)
    dropout: float
    attention_dropout: float
    attention: str
    convolution: str
    mask_convolution: bool
    layer_norm_epsilon: float
    initializers: str
    initializer_range: float


@dataclasses.dataclass(frozen=True)
class StageConfig:
    """`depth` identical layers, their parameters stacked and run by one `lax.scan`."""

    depth: int
    layer: LayerConfig


@dataclasses.dataclass(frozen=True)
class EmbeddingsConfig:
    """Word + position + segment-type tables and their layer norm, at `size` channels."""

    vocab_size: int
    size: int
    positions: int
    types: int
    dropout: float
    layer_norm_epsilon: float
    initializer_range: float


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """After the embeddings: a projection if the sizes differ, then the stages in order."""

    embedding_size: int
    hidden_size: int
    stages: tuple[StageConfig, ...]
    remat: str
    scan_unroll: int
    initializers: str
    initializer_range: float

    @property
    def depth(self) -> int:
        return sum(stage.depth for stage in self.stages)


# --- The sections of a config ---

REMAT_POLICIES = ("none", "dots", "full")
INITIALIZERS = ("release", "huggingface")
ATTENTIONS = ("auto", "xla", "cudnn", "splash")
CONVOLUTIONS = ("auto", "xla", "pallas_tpu", "pallas_gpu", "reference")


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """The network that is kept: the discriminator, or the one of a masked language model."""

    layers: int = 12
    hidden_size: int = 256
    embedding_size: int = 128  # a dense projection follows if this differs from hidden_size
    heads: int = 4  # nominal heads; head width = hidden_size // heads
    head_ratio: int = 2  # gamma: heads // head_ratio heads of attention, as many of convolution
    mixer: str = "mixed"  # mixed (ConvBERT) | attention (BERT, ELECTRA)
    kernel_size: int = 9
    ffn_size: int = 1024
    ffn_groups: int = 1
    positions: int = 512  # rows of the learned position table, the longest input
    types: int = 2  # rows of the segment-type table
    dropout: float = 0.1
    attention_dropout: float = 0.1
    # auto: the fastest per platform (attention: xla if there is attention dropout)
    attention: str = "auto"  # auto | xla | cudnn (GPU) | splash (TPU)
    convolution: str = "auto"  # auto | xla | pallas_tpu | pallas_gpu | reference
    layer_norm_epsilon: float = 1e-12
    # True: no convolution tap reads padding or another document. Release: the convolution branch
    # never sees the mask, so outputs depend on how much padding follows; needed for parity with
    # published weights.
    mask_convolution: bool = True
    # release: truncated normal, depthwise 1/kernel_size, Glorot for the embedding projection and
    # the last dense of the discriminator head. huggingface: normal(initializer_range) everywhere,
    # which starts the key convolution 5 times smaller.
    initializers: str = "release"
    initializer_range: float = 0.02
    # none | dots (keep matmul outputs) | full (keep layer inputs only): memory against speed
    remat: str = "none"
    scan_unroll: int = 1  # layers per scan iteration; more compiles longer and can run faster


@dataclasses.dataclass(frozen=True)
class GeneratorSection:
    """The small masked language model that proposes replacements (ELECTRA §3)."""

    # separate | shared (the encoder itself with an MLM head) | uniform (random tokens)
    kind: str = "separate"
    size: float = 0.25  # width of hidden layer, feed-forward and heads relative to the encoder
    layers: float = 1.0  # depth relative to the encoder
    # one embedding table (words, positions, types, layer norm) for both networks
    tie_embeddings: bool = True
    # Release: where fewer heads than head_ratio remain (the small generator: 1), it uses 1
    # attention + 1 convolution head of full width, so 128 channels go into a hidden size of 64.
    # False: heads share the width (this can be stored in Hugging Face's format, the other cannot).
    release_heads: bool = True


@dataclasses.dataclass(frozen=True)
class ObjectiveSection:
    """Masking, sampling and the weights of the losses."""

    mask_fraction: float = 0.15  # of the real tokens, [CLS] and [SEP] counted
    # Slots per row are rounded up to this multiple and filled with zero weight. Release: 1 (19
    # slots at length 128).
    prediction_multiple: int = 8
    # Release: positions are drawn with replacement, so some are drawn twice and count twice in the
    # MLM loss.
    sample_with_replacement: bool = False
    # Release: where a position was drawn twice, the floor of the mean of both sampled ids, an
    # arbitrary token, is put in.
    average_duplicate_ids: bool = False
    # of the chosen positions become [MASK]; ELECTRA and the release: 0.85
    mask_token_fraction: float = 0.85
    random_token_fraction: float = 0.0  # BERT: 0.8 / 0.1; the rest stays unchanged
    temperature: float = 1.0  # of the generator's samples
    disallow_correct: bool = False  # never sample the original token
    # Release: Gumbel noise for every vocabulary entry, with 1e-9 inside both logarithms. False: one
    # uniform number per slot through the cumulative distribution, the same samples for less work.
    release_gumbel: bool = False
    generator_weight: float = 1.0
    discriminator_weight: float = 50.0
    # Release: AUC counts every padding position as a correct answer; adds it as release_auc.
    release_metrics: bool = False


@dataclasses.dataclass(frozen=True)
class TokenizerSection:
    """Subword vocabulary: trained on the corpus, or read from `path`."""

    kind: str = "sentencepiece"  # sentencepiece | wordpiece
    vocab_size: int = 30_522
    path: str = ""  # vocab.txt, tokenizer.json or a SentencePiece .model; "" trains one
    lowercase: bool = True
    strip_accents: bool = True  # wordpiece and sentencepiece; BERT's uncased vocabularies expect it
    algorithm: str = "unigram"  # of SentencePiece: unigram | bpe
    # longer words become [UNK] (wordpiece). Release: 200; Hugging Face: 100
    max_word_chars: int = 200
    # text used to train a vocabulary, sampled evenly from the whole corpus
    train_megabytes: int = 30
    max_unknown_rate: float = 0.02  # more [UNK] than this on the corpus is refused


@dataclasses.dataclass(frozen=True)
class DataSection:
    """The corpus and how it becomes rows of `length` tokens."""

    # docstrings | text:GLOB | tfds:NAME or tfds:DIR | parquet:GLOB | hub:OWNER/NAME/FILE-GLOB |
    # datasets:NAME[/CONFIG]
    source: str = "docstrings"
    format: str = "auto"  # of text files: auto | blank_lines | lines | jsonl | wikiextractor | file
    text_field: str = "text"  # of jsonl, parquet, TFDS and datasets
    split: str = "train"  # of TFDS and datasets
    # a corpus of its own for evaluation; "" holds out documents of `source`
    validation_source: str = ""
    heldout_fraction: float = 0.01  # of the documents, chosen by a hash of their text
    length: int = 128
    # packed (documents fill rows, isolated by segment ids) | electra (the release's example
    # builder)
    layout: str = "packed"
    # Release: two conditions of its example builder are inverted, so that most examples have one
    # segment and some an empty first one. Only with layout="electra".
    release_builder_bug: bool = False
    # Release: shard files are shuffled, four read in turn through a buffer of 100 rows. False:
    # every row, any order.
    release_shuffle: bool = False
    # text that is not UTF-8: error | replace | skip (leave the document out)
    encoding_errors: str = "error"
    directory: str = ""  # prepared shards; "" is WORKDIR/data. Name one to share it between runs
    workers: int = 0  # processes that tokenize; 0 is one per core
    prefetch: int = 8  # batches read ahead


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW with a linear schedule (the release's model/optimization.py)."""

    learning_rate: float = 3e-4  # peak
    warmup_steps: int = 10_000
    decay_to: float = 0.0  # learning rate at the last step, as a fraction of the peak
    # Release: the decay runs during warm-up too and both multiply: the peak stays a little below
    # the nominal rate.
    decay_during_warmup: bool = False
    bias_correction: bool = True  # Release: Adam without it
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    # Release: embedding tables are decayed; biases and layer norms never are
    decay_embeddings: bool = True
    clip_norm: float = 1.0  # global norm, before Adam; 0 is off


@dataclasses.dataclass(frozen=True)
class TrainSection:
    """The loop. `batch_size` is global: the same run on 1 or 256 chips."""

    steps: int = 1_000_000
    batch_size: int = 128
    accumulation: int = 1  # microbatches per step
    log_every: int = 100
    eval_every: int = 5_000
    eval_rows: int = 8_192  # held-out rows per evaluation, 0 is all
    # compare generator accuracy, replaced rate and AUC with reference bands
    warn_health: bool = True
    profile_start: int = 0  # first step of a profiler trace; 0 is never
    profile_steps: int = 3
    # "" is off; several hosts need one shared path
    compile_cache: str = "~/.cache/convbert_jax/compile"


@dataclasses.dataclass(frozen=True)
class CheckpointSection:
    every: int = 5_000  # steps
    keep: int = 3  # newest kept
    keep_every: int = 0  # steps; these are kept for good, 0 is none
    best_metric: str = ""  # "" keeps no best; e.g. "discriminator_auc" (see README for names)
    best_mode: str = "max"  # max | min
    # steps; writes a Hugging Face folder WORKDIR/huggingface/step-N, at step 0 too; 0 is never
    huggingface_every: int = 0


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices by axis, -1 is all that are left: data copies parameters, fsdp shards them, tensor
    splits heads and feed-forward channels.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


PLATFORMS = ("any", "cpu", "gpu", "tpu")
DTYPES = ("auto", "float32", "bfloat16")
RECIPES = ("replaced_token", "masked_lm")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run, whole."""

    name: str = "run"  # workdir defaults to runs/NAME
    variant: str = "default"  # default | paper, as given after the colon of --config
    recipe: str = "replaced_token"  # replaced_token (ELECTRA) | masked_lm (BERT); see recipes.py
    seed: int = 0
    # weights that a new run starts from: a run's folder, a Hugging Face folder or a TensorFlow 1
    # checkpoint; "" starts from random ones
    init_from: str = ""
    platform: str = "any"  # stop unless the run finds this: any | cpu | gpu | tpu
    # auto: bfloat16 on accelerators, float32 on a CPU. Parameters and optimizer stay float32
    compute_dtype: str = "auto"
    model: ModelSection = dataclasses.field(default_factory=ModelSection)
    generator: GeneratorSection = dataclasses.field(default_factory=GeneratorSection)
    objective: ObjectiveSection = dataclasses.field(default_factory=ObjectiveSection)
    tokenizer: TokenizerSection = dataclasses.field(default_factory=TokenizerSection)
    data: DataSection = dataclasses.field(default_factory=DataSection)
    optimizer: OptimizerSection = dataclasses.field(default_factory=OptimizerSection)
    train: TrainSection = dataclasses.field(default_factory=TrainSection)
    checkpoint: CheckpointSection = dataclasses.field(default_factory=CheckpointSection)
    mesh: MeshSection = dataclasses.field(default_factory=MeshSection)

    @property
    def embeddings(self) -> EmbeddingsConfig:
        """Embeddings of the encoder, shared with the generator unless it is untied."""
        return self._embeddings(self.model.embedding_size)

    @property
    def generator_embeddings(self) -> EmbeddingsConfig:
        """Embeddings of an untied generator, at its own hidden size as in the release."""
        return self._embeddings(self.generator_encoder.hidden_size)

    @property
    def encoder(self) -> EncoderConfig:
        m = self.model
        return self._encoder(
            embedding_size=m.embedding_size,
            hidden_size=m.hidden_size,
            layers=m.layers,
            ffn_size=m.ffn_size,
            heads=m.heads,
            head_size=m.hidden_size // m.heads,
            release_heads=True,
        )

    @property
    def generator_encoder(self) -> EncoderConfig:
        """The release's generator: width, feed-forward and number of heads cut by `size`."""
        m, g = self.model, self.generator
        hidden = round(m.hidden_size * g.size)
        heads = max(1, int(m.heads * g.size + 1e-9))
        return self._encoder(
            embedding_size=m.embedding_size if g.tie_embeddings else hidden,
            hidden_size=hidden,
            layers=max(1, round(m.layers * g.layers)),
            ffn_size=4 * hidden,
            heads=heads,
            head_size=hidden // heads,
            release_heads=g.release_heads,
        )

    @property
    def max_predictions(self) -> int:
        """Most positions masked in a row, as in the release: 19 of 128 at a fraction of 0.15."""
        return max(1, int((self.objective.mask_fraction + 0.005) * self.data.length))

    @property
    def prediction_slots(self) -> int:
        """Masked slots M of the static shape: `max_predictions`, rounded up for the hardware."""
        multiple = self.objective.prediction_multiple
        return math.ceil(self.max_predictions / multiple) * multiple

    def _embeddings(self, size: int) -> EmbeddingsConfig:
        m = self.model
        return EmbeddingsConfig(
            vocab_size=self.tokenizer.vocab_size,
            size=size,
            positions=m.positions,
            types=m.types,
            dropout=m.dropout,
            layer_norm_epsilon=m.layer_norm_epsilon,
            initializer_range=m.initializer_range,
        )

    def _encoder(
        self, *, embedding_size, hidden_size, layers, ffn_size, heads, head_size, release_heads
    ):
        m = self.model
        attention_heads = heads
        if m.mixer == "mixed":
            attention_heads = heads // m.head_ratio
            if (
                attention_heads < 1
            ):  # the release: one head of each kind, as wide as the nominal one
                attention_heads = 1
                head_size = head_size if release_heads else head_size // 2
        layer = LayerConfig(
            hidden_size=hidden_size,
            mixer=m.mixer,
            attention_heads=attention_heads,
            head_size=head_size,
            kernel_size=m.kernel_size,
            ffn_size=ffn_size,
            ffn_groups=m.ffn_groups,
            dropout=m.dropout,
            attention_dropout=m.attention_dropout,
            attention=m.attention,
            convolution=m.convolution,
            mask_convolution=m.mask_convolution,
            layer_norm_epsilon=m.layer_norm_epsilon,
            initializers=m.initializers,
            initializer_range=m.initializer_range,
        )
        return EncoderConfig(
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            stages=(StageConfig(layers, layer),),
            remat=m.remat,
            scan_unroll=m.scan_unroll,
            initializers=m.initializers,
            initializer_range=m.initializer_range,
        )


def to_config_dict(config: Config | None = None):
    """`config` (default: all defaults) as a locked ConfigDict, for a config file to fill in."""
    from ml_collections import config_dict

    return config_dict.ConfigDict(dataclasses.asdict(config or Config())).lock()


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dict, JSON-serializable; `from_config_dict` reads it back."""
    return dataclasses.asdict(config)


def from_config_dict(values: Mapping[str, Any]) -> Config:
    """Reads and checks a config.

    Args:
      values: nested mapping with the sections of `Config`; missing fields take their defaults.

    Raises:
      ConfigError: an unknown field (the nearest name is offered), a value of the wrong type, or
      values that cannot work together.
    """
    from convbert_jax import config_checks  # the rules read these classes, so they come second

    config = _from_mapping(Config, values, path="")
    config_checks.check(config)
    return config


def _from_mapping(cls, values: Mapping[str, Any], path: str):
    fields = typing.get_type_hints(cls)
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.4)
            hint = (
                f"did you mean config.{path}{near[0]}?"
                if near
                else f"fields here: {', '.join(fields)}."
            )
            raise ConfigError(f"config.{path}{key} does not exist; {hint}")
    arguments = {}
    for key, value in values.items():
        kind = fields[key]
        if dataclasses.is_dataclass(kind):
            if not hasattr(value, "items"):
                raise ConfigError(
                    f"config.{path}{key} is a section, not a value; set one of its fields."
                )
            arguments[key] = _from_mapping(kind, value, path=f"{path}{key}.")
            continue
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ConfigError(
                f"config.{path}{key}={value!r} must be of type {kind.__name__}, "
                f"not {type(value).__name__}."
            )
        arguments[key] = value
    return cls(**arguments)
