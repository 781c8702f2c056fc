"""What the text after the colon of --config selects: `default`; `paper`, ConvBERT as its official
code trains it; `bert`, masked words as BERT has them; `light`, `dynamic` and `dilated`, an encoder
of convolutions alone.

Each line below is one field of `convbert_jax/config/`, whose comment says what the release does.

What `paper` leaves out:
- AUC from 200 thresholds of the probability; ours is exact.
- Evaluation on the first 100 batches of the training data; ours holds documents out.
- The clipping norm without a TPU. There tf.clip_by_global_norm squares the rows of an IndexedSlices
  gradient before those of repeated ids are added; ours adds them first. It concerns word tables
  that are only looked up: untied and uniform generators, and fine-tuning.
- WordPiece of BERT's tokenization.py: ours is that of Hugging Face's tokenizers, which removes
  characters for private use and knows the punctuation of an older Unicode.
The random numbers differ too, and the corpus, which was OpenWebText.

What `bert` leaves out: next sentence prediction, so the second segment always follows the first,
and the last tenth of the steps at 512 tokens (bert.py has both); masks drawn ten times beforehand,
ours are new in every epoch; the clipping by each of its 16 TPU cores. Its warm-up rises to the full
rate and falls at once to the line of the decay; ours rises to that line, at most 1% lower on the
way. Its rate is published for BERT-base only: the other sizes keep theirs.

`light` and `dynamic` have the block and the growing filters of LightConv and DynamicConv (Wu et al.
2019), here in place of all attention, and everything else as the default: they reproduce nothing
published. With one layer of attention, --config.model.stages says which.
"""

from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice

CONVOLUTIONAL = ("light", "dynamic", "dilated")
VARIANTS = ("default", "paper", "bert", *CONVOLUTIONAL)


def start(name: str, variant: str):
    """A ConfigDict with all defaults for the run `name`, ready for its sizes; see `finish`.

    Raises:
      ConfigError: the variant is unknown.
    """
    check_choice("variant", variant, VARIANTS)
    config = to_config_dict()
    config.name = name if variant == "default" else f"{name}-{variant}"
    config.variant = variant
    return config


def finish(config):
    """Applies the variant last, so that it sees the sizes."""
    if config.variant == "paper":
        _follow_release(config)
    if config.variant == "bert":
        follow_bert(config)
        config.model.embedding_size = config.model.hidden_size
        config.model.ffn_groups = 1
        config.data.layout = "electra"
    if config.variant in CONVOLUTIONAL:
        _only_convolve(config)
    return config.lock()


def _follow_release(config) -> None:
    """What ConvBERT's code adds to ELECTRA's. The eight parts of a batch are in base.py, the only
    size that was trained on a TPU.
    """
    follow_electra(config)
    config.model.mask_convolution = False
    config.data.release_builder_bug = True


def follow_electra(config) -> None:
    """Pre-training of ELECTRA's official code, on which ConvBERT's is built.

    Not here because the default does the same: initializers, generator sizes and heads, 85% [MASK]
    / 15% unchanged, loss weights 1 and 50, epsilon 1e-6 and decay of embedding tables.
    """
    config.compute_dtype = "float32"
    config.objective.sample_with_replacement = True
    config.objective.average_duplicate_ids = True
    config.objective.prediction_multiple = 1
    config.objective.release_gumbel = True
    config.objective.release_metrics = True
    config.optimizer.bias_correction = False
    config.optimizer.decay_during_warmup = True
    config.data.layout = "electra"
    config.data.shuffle_documents = True
    config.data.release_shuffle = True
    _tokenize_as_bert(config)


def follow_bert(config) -> None:
    """BERT's layers, and its pre-training (Devlin et al., 2019, A.2, and its code).

    Not here because the default does the same: 15% of the tokens, drawn without replacement,
    truncated normal initializers, decay 0.01 of all but biases and layer norms, clipping at 1,
    10,000 steps of warm-up, dropout 0.1. The rate of BERT-base is in base.py.
    """
    config.recipe = "masked_lm"
    config.compute_dtype = "float32"
    config.model.mixer = "attention"
    config.objective.mask_token_fraction = 0.8
    config.objective.random_token_fraction = 0.1
    config.optimizer.bias_correction = False
    config.optimizer.decay_during_warmup = True
    _tokenize_as_bert(config)


def _tokenize_as_bert(config) -> None:
    config.tokenizer.kind = "wordpiece"
    config.tokenizer.lowercase = True
    config.tokenizer.strip_accents = True


def _only_convolve(config) -> None:
    """light, dynamic: filters of 3, 7, 15 and from the fourth layer on 31 taps, those of the
    published encoder of 7 layers. dilated: 7 taps, 1, 2, 4, 8, 1, 2, ... positions apart.
    """
    config.model.mixer = config.variant
    layers = range(config.model.layers)
    if config.variant == "dilated":
        config.model.kernel_size = 7
        config.model.dilations = tuple(2 ** (layer % 4) for layer in layers)
    else:
        config.model.kernel_sizes = tuple((3, 7, 15, 31)[min(layer, 3)] for layer in layers)
