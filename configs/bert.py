"""BERT, the baseline of masked words, with its sentence pairs (Devlin et al., 2019, A.2, and its
official code).

base: 108.9M parameters, 1M steps of 256 rows: nine tenths at 128 tokens, here a run, and the last
tenth at 512, `base_512`, a second run that starts from the first one's weights and goes on with its
learning rate; Adam's moments begin anew there, so it has a short warm-up and bias correction.
Published: GLUE test 80.9 (mean of ConvBERT's table 3), SQuAD 1.1 dev 80.7 / 88.4 EM / F1. small:
ELECTRA's BERT-small (Clark et al., 2020, table 6): 13.5M parameters, 1.45M steps of 128 x 128
tokens, 1.4e18 FLOPs, masked words alone. (ELECTRA's code would mask 85 / 0 / 15 there; here as in
base it is BERT's 80 / 10 / 10.)

    python -m convbert_jax.main --config=configs/bert.py:base --config.tokenizer.path=vocab.txt
    python -m convbert_jax.main --config=configs/bert.py:base_512 --config.init_from=runs/bert-base
    python -m convbert_jax.main --config=configs/bert.py:small --config.tokenizer.path=vocab.txt

Sentence order as in ALBERT in the place of next sentence prediction:
--config.objective.sentence_pairs=order; neither: --config.objective.sentence_pairs=none
--config.data.layout=packed (or electra, two segments that always follow each other).

Corpus: as small.py says; BERT's was Wikipedia and BooksCorpus. Left out: what variants.py says of
`bert`, but for sentence pairs. A pair is of whole sentences here (data/corpus/pairs.py), where the
official code cuts one that is too long.
"""

from configs import variants
from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice

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
    config.optimizer.decay_to = 0.1  # where a decay to 0 in 1M steps is after 900,000
    config.train.steps = 900_000
    config.train.batch_size = 256


def _go_on_longer(config) -> None:
    config.data.length = 512
    config.optimizer.learning_rate = 1e-5
    config.optimizer.decay_to = 0.0
    config.optimizer.warmup_steps = 1_000
    config.optimizer.bias_correction = True
    config.train.steps = 100_000
