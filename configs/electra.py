"""ELECTRA, the baseline of ConvBERT, with sizes and training recipe of its official code (Clark et
al., 2020, table 6).

small: 13.5M parameters (14.2M trained), 1M steps of 128 x 128 tokens: 1.3e18 FLOPs by the authors'
count. Published for OpenWebText instead of the paper's corpus, GLUE dev: CoLA 56.8, SST-2 88.3,
MNLI 78.9; ConvBERT's table 3 has 78.0 on the GLUE test sets. small_plus_plus: the published small
model, with a generator of full size and 4M steps. Its length is not published; here it is 512, as
used on SQuAD: 3.6e19 FLOPs by ELECTRA's counter, 3.3e19 in ConvBERT's table. GLUE test 79.7. base:
108.9M parameters, 766,000 steps of 256 x 512 tokens, 6.4e19 FLOPs, GLUE test 83.5. medium_small:
width and learning rate of ConvBERT-medium-small with plain layers, 25.3M parameters; no published
results.

    python -m convbert_jax.main --config=configs/electra.py:small --config.tokenizer.path=vocab.txt

To compare ELECTRA and ConvBERT with equal data, optimizer, size and seed, change only the mixer and
share the shards:

    python -m convbert_jax.main --config=configs/electra.py:small --config.data.directory=shards
    python -m convbert_jax.main --config=configs/electra.py:small --config.data.directory=shards \\
        --config.model.mixer=mixed --workdir=runs/electra-small-mixed

Corpus: see small.py; the paper used BERT's, and XLNet's for small_plus_plus. Differences from the
official code, as in variants.py: AUC thresholds and evaluation on training data. The number of TPU
cores that clipped gradients of base separately is not published.
"""

from configs import variants
from convbert_jax.config import to_config_dict
from convbert_jax.config.fields import check_choice

_SMALL = {"hidden_size": 256, "embedding_size": 128, "heads": 4, "ffn_size": 1_024}
_MEDIUM = {"hidden_size": 384, "embedding_size": 128, "heads": 8, "ffn_size": 1_536}
_BASE = {"hidden_size": 768, "embedding_size": 768, "heads": 12, "ffn_size": 3_072}
# size -> model, generator.size, learning rate, steps, batch, length
SIZES = {
    "small": (_SMALL, 0.25, 5e-4, 1_000_000, 128, 128),
    "small_plus_plus": (_SMALL, 1.0, 5e-4, 4_000_000, 128, 512),
    "medium_small": (_MEDIUM, 0.25, 5e-4, 1_000_000, 128, 128),
    "base": (_BASE, 1 / 3, 2e-4, 766_000, 256, 512),
}


def get_config(size: str = "small"):
    check_choice("variant", size, tuple(SIZES))
    model, generator, rate, steps, batch, length = SIZES[size]
    config = to_config_dict()
    config.name = f"electra-{size}"
    config.variant = size
    variants.follow_electra(config)
    config.model.mixer = "attention"
    config.model.update(model)
    config.model.scan_unroll = 12
    config.generator.size = generator
    config.generator.scan_unroll = 12
    config.optimizer.learning_rate = rate
    config.train.steps = steps
    config.train.batch_size = batch
    config.data.length = length
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    return config.lock()
