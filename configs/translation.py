"""Translation by LightConv, DynamicConv, a Transformer or any other mixer (Wu et al. 2019).

tiny: 2.2M parameters, for a CPU; no published counterpart. iwslt_de_en: published 35.2 BLEU for
`dynamic` (tokenized, beam 4, 10 checkpoints averaged), 50,000 steps of 4,000 tokens. wmt_en_de_big:
published 29.7 for `dynamic` (compound-split BLEU, beam 5), 30,000 steps of 458,752 tokens on any
number of devices. LightConv is mixer `light`, DynamicConv is `dynamic`.

    python -m convbert_jax.main --config=configs/translation.py:tiny,dynamic \\
        --config.parallel.source=parallel:train.en,train.de
    python -m convbert_jax.main --config=configs/translation.py:iwslt_de_en,light \\
        --config.parallel.source=parallel:train.de,train.en \\
        --config.parallel.validation_source=parallel:valid.de,valid.en

Differences from the published recipes: SentencePiece on raw text instead of Moses tokenization and
BPE; scores by sacreBLEU, where the published ones are of tokenized text.
"""

from configs import written


def get_config(variant: str = "tiny,dynamic"):
    config, size = written.start("translation", variant, tuple(_SIZES))
    config.objective.label_smoothing = 0.1
    config.optimizer.schedule = "inverse_sqrt"
    config.optimizer.beta2 = 0.98
    config.optimizer.epsilon = 1e-8
    config.optimizer.clip_norm = 0.0
    _SIZES[size](config)
    return config.lock()


def _make_tiny(config) -> None:
    config.tokenizer.vocab_size = 8_000
    config.parallel.batch_tokens = 2_048
    config.parallel.shapes = 4
    # Better than AdamW on Multi30k (benchmarks/notes/sequences.md).
    config.optimizer.method = "muon"
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 4e-3
    config.optimizer.warmup_steps = 100
    config.optimizer.clip_norm = 1.0
    config.train.steps = 4_000
    config.train.log_every = 100
    config.train.eval_every = 1_000
    config.checkpoint.every = 200
    config.checkpoint.keep = 5
    config.decoding.average = 5


def _make_iwslt(config) -> None:
    config.tokenizer.vocab_size = 10_000
    config.parallel.batch_tokens = 4_000
    config.parallel.max_ratio = 1.5
    config.parallel.max_length = 175
    config.optimizer.learning_rate = 5e-4
    config.optimizer.warmup_steps = 4_000
    config.optimizer.weight_decay = 1e-4
    config.train.steps = 50_000
    config.checkpoint.every = 1_000
    config.checkpoint.keep = 10
    config.decoding.average = 10


def _make_wmt(config) -> None:
    config.tokenizer.vocab_size = 32_768
    config.parallel.batch_tokens = 458_752
    config.parallel.max_ratio = 1.5
    config.optimizer.schedule = "cosine"
    config.optimizer.learning_rate = 1e-3
    config.optimizer.warmup_steps = 10_000
    config.optimizer.weight_decay = 0.0
    config.train.steps = 30_000
    config.checkpoint.every = 500
    config.checkpoint.keep = 10
    config.decoding.beam = 5
    config.decoding.length_penalty = 0.5
    config.decoding.average = 10


_SIZES = {"tiny": _make_tiny, "iwslt_de_en": _make_iwslt, "wmt_en_de_big": _make_wmt}
