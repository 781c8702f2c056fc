"""Variants of the pre-training configs: `default`; `paper`, the recipe of the official ConvBERT
code; `bert`, BERT's masked language model; `light`, `dynamic` and `dilated`, convolution only.

The comments in `convbert_jax/config/` describe the behavior of the official code for each field.

Differences of `paper` from the official code:
- AUC is exact, not computed from 200 thresholds of the probability.
- Evaluation uses held-out documents, not the first 100 batches of the training data.
- The clipping norm adds gradient rows of repeated ids before squaring. Without a TPU,
  tf.clip_by_global_norm squares the rows of an IndexedSlices gradient first. This affects word
  tables that are only looked up: untied and uniform generators, and fine-tuning.
- WordPiece is implemented by Hugging Face's tokenizers, not BERT's tokenization.py. It removes
  private-use characters and uses the punctuation of an older Unicode version.
- Random numbers and the corpus (OpenWebText) differ.

Differences of `bert` from BERT's code:
- No next sentence prediction (the second segment always follows the first), and all steps have the
  same length; bert.py has sentence pairs and the last tenth of the steps at 512 tokens.
- Masks are sampled in every epoch, not ten times in advance.
- Gradients are not clipped separately on 16 TPU cores.
- The warm-up ends on the line of the decay and is at most 1% lower; BERT's ends at the full rate
  and then drops to that line.
- The learning rate is published for BERT-base only; other sizes keep theirs.

`light` and `dynamic` replace all attention by the blocks of LightConv and DynamicConv (Wu et al.
2019) with growing kernel sizes; other fields are as in the default. They have no published
counterpart. Use --config.model.stages to keep an attention layer.
"""

from convbert_jax.config import to_config_dict
from convbert_jax.config.fields import check_choice

CONVOLUTIONAL = ("light", "dynamic", "dilated")
VARIANTS = ("default", "paper", "bert", *CONVOLUTIONAL)


def start(name: str, variant: str):
    """Returns a ConfigDict with all defaults for the run `name`; call `finish` after setting sizes.

    Raises:
      ConfigError: the variant is unknown.
    """
    check_choice("variant", variant, VARIANTS)
    config = to_config_dict()
    config.name = name if variant == "default" else f"{name}-{variant}"
    config.variant = variant
    return config


def finish(config):
    """Applies the variant, which depends on the sizes, and locks the config."""
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
    """Sets the recipe of the official ConvBERT code, which is based on ELECTRA's.

    release_replicas is set in base.py, the only size that was trained on a TPU.
    """
    follow_electra(config)
    config.model.mask_convolution = False
    config.data.release_builder_bug = True


def follow_electra(config) -> None:
    """Sets the pre-training recipe of ELECTRA's official code.

    Equal by default: initializers, generator sizes and heads, 85% [MASK] / 15% unchanged, loss
    weights 1 and 50, epsilon 1e-6 and weight decay of embedding tables.
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
    """Sets BERT's layers and pre-training recipe (Devlin et al., 2019, A.2, and its code).

    Equal by default: 15% of the tokens, sampled without replacement, truncated normal initializers,
    weight decay 0.01 except for biases and layer norms, clipping at 1, 10,000 warm-up steps,
    dropout 0.1. The learning rate of BERT-base is set in base.py.
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
    """Sets a convolution-only encoder.

    light, dynamic: kernel sizes 3, 7, 15, and 31 from the fourth layer on, as in the published
    encoder of 7 layers. dilated: kernel size 7 with dilations 1, 2, 4, 8, 1, 2, ...
    """
    config.model.mixer = config.variant
    layers = range(config.model.layers)
    if config.variant == "dilated":
        config.model.kernel_size = 7
        config.model.dilations = tuple(2 ** (layer % 4) for layer in layers)
    else:
        config.model.kernel_sizes = tuple((3, 7, 15, 31)[min(layer, 3)] for layer in layers)
