"""BERT, the masked language model baseline, with sentence pairs (Devlin et al., 2019, A.2, and its
official code).

base: 108.9M parameters, 1M steps of 256 rows in two runs. The first run trains nine tenths of the
steps at 128 tokens; `base_512` trains the last tenth at 512 tokens from the weights of the first
run and continues its learning rate. Adam's moments are reset, so it has a short warm-up and bias
correction. Published: GLUE test 80.9 (mean of ConvBERT's table 3), SQuAD 1.1 dev 80.7 / 88.4 EM /
F1. small: ELECTRA's BERT-small (Clark et al., 2020, table 6): 13.5M parameters, 1.45M steps of 128
x 128 tokens, 1.4e18 FLOPs, MLM only. (ELECTRA's code would mask 85 / 0 / 15 there; here as in base
it is BERT's 80 / 10 / 10.)

    python -m convbert_jax.main --config=configs/bert.py:base --config.tokenizer.path=vocab.txt
    python -m convbert_jax.main --config=configs/bert.py:base_512 --config.init_from=runs/bert-base
    python -m convbert_jax.main --config=configs/bert.py:small --config.tokenizer.path=vocab.txt

For ALBERT's sentence order prediction instead of next sentence prediction set
--config.objective.sentence_pairs=order; for neither --config.objective.sentence_pairs=none
--config.data.layout=packed (or electra: two consecutive segments).

Corpus: see small.py; BERT used Wikipedia and BooksCorpus. Differences from the official code: those
of `bert` in variants.py except for sentence pairs, and pairs consist of whole sentences
(data/layouts.py), where the official code truncates long pairs.
"""

from configs import variants
from convbert_jax.config import to_config_dict
from convbert_jax.config.fields import check_choice

SIZES = ("base", "base_512", "small")


def get_config(size: str = "base"):
    check_choice("variant", size, SIZES)
    config = to_config_dict()
    config.name = f"bert-{size}"
    config.variant = size
    variants.follow_bert(config)
    config.data.source = "hub:wikimedia/wikipedia/20231101.en/*.parquet"
    config.model.scan_unroll = 12
    if size == "small":
        _make_small(config)
    else:
        _make_base(config)
    if size == "base_512":
        _go_on_longer(config)
    return config.lock()


def _make_small(config) -> None:
    config.model.hidden_size = 256
    config.model.embedding_size = 128
    config.model.heads = 4
    config.model.ffn_size = 1_024
    config.data.layout = "electra"
    config.optimizer.learning_rate = 5e-4
    config.train.steps = 1_450_000
    config.train.batch_size = 128


def _make_base(config) -> None:
    config.model.hidden_size = 768
    config.model.embedding_size = 768
    config.model.heads = 12
    config.model.ffn_size = 3_072
    config.objective.sentence_pairs = "next"
    config.data.layout = "pairs"
    config.optimizer.learning_rate = 1e-4
    config.optimizer.decay_to = 0.1  # the value at step 900,000 of a decay to 0 in 1M steps
    config.train.steps = 900_000
    config.train.batch_size = 256


def _go_on_longer(config) -> None:
    config.data.length = 512
    config.optimizer.learning_rate = 1e-5
    config.optimizer.decay_to = 0.0
    config.optimizer.warmup_steps = 1_000
    config.optimizer.bias_correction = True
    config.train.steps = 100_000
