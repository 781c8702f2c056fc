"""ELECTRA, the baseline that ConvBERT is compared with: its sizes, recipe and quirks (Clark et al.,
2020, table 6, and its official code).

small: 13.5M parameters (14.2M trained), 1M steps of 128 x 128 tokens: 1.3e18 FLOPs as its authors
count. Published with OpenWebText in the paper's place, GLUE dev: CoLA 56.8, SST-2 88.3, MNLI 78.9;
ConvBERT's table 3 has 78.0 on the GLUE test sets. small_plus_plus: the released small model: a
generator of full size, 4M steps. Its length is not published; 512 here, as it is used on SQuAD: by
ELECTRA's counter 3.6e19 FLOPs, where ConvBERT's table says 3.3e19. GLUE test 79.7 there. base:
108.9M parameters, 766,000 steps of 256 x 512 tokens, 6.4e19 FLOPs, GLUE test 83.5. medium_small:
nothing published; ConvBERT-medium-small's width and rate with plain layers, 25.3M parameters.

    python -m convbert_jax.main --config=configs/electra.py:small --config.tokenizer.path=vocab.txt

ELECTRA against ConvBERT at equal everything, data, optimizer, size and seed, is the same command
with another mixer, on the same shards:

    python -m convbert_jax.main --config=configs/electra.py:small --config.data.directory=shards
    python -m convbert_jax.main --config=configs/electra.py:small --config.data.directory=shards \\
        --config.model.mixer=mixed --workdir=runs/electra-small-mixed

Corpus: as small.py says; the paper's was that of BERT, and of XLNet for small_plus_plus. Left out,
as in variants.py: the thresholds of its AUC, and its evaluation on training data; on how many TPU
cores base clipped its gradients is not published.
"""

from configs import variants
from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice

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
