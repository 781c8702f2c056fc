"""Fine-tuning speed on CoLA: vectorized against sequential seeds, and against PyTorch.

    python -m benchmarks.speed.finetuning_speed --part seeds
    python -m benchmarks.speed.finetuning_speed --part pytorch --sizes tiny small

All variants alternate in one process. Tokenization and a first round with compilation are not
timed.

- `seeds`: seconds to train five runs and to predict the dev set with each.
- `pytorch`: seconds of a whole training loop (batch 32, dropout, AdamW, clipping,
  linear schedule) and of prediction (batch 128), against Hugging Face's
  ConvBertForSequenceClassification with the same weights, after a check that logits agree. It pads
  to the longest text of a batch, like Hugging Face's data collator. Ours groups rows of similar
  length and pads to the lengths of config.finetune.buckets.

Needs the data folder (CONVBERT_DATA) with CoLA and the vocabulary; `pytorch` needs torch and
transformers.
"""

import argparse
import dataclasses
import importlib
import os
import statistics
import tempfile
from pathlib import Path

from benchmarks import public_data, timing

SEEDS = range(5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("seeds", "pytorch"), required=True)
    parser.add_argument("--sizes", nargs="+", default=["tiny"], choices=("tiny", "small"))
    parser.add_argument("--rows", type=int, default=640, help="training rows")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    print(f"CoLA, {arguments.rows} rows, float32, {timing.describe_processor()}")
    table = timing.Table("size", "work", "program", "seconds", "the other / this")
    for size in arguments.sizes:
        part = {"seeds": compare_seeds, "pytorch": compare_pytorch}[arguments.part]
        for work, runs in part(Ours(size, arguments.rows)):
            times = timing.alternate(runs, arguments.rounds)
            *_, baseline = times.values()
            for name, found in times.items():
                ratio = timing.describe_ratios(found, baseline) if found is not baseline else ""
                table.add(size, work, name, statistics.median(found) / 1e3, ratio)


class Ours:
    """An encoder of one size with random weights, CoLA, and the loop of `finetuning/`."""

    def __init__(self, size: str, rows: int):
        import jax
        import jax.numpy as jnp

        from configs import finetuning as configs
        from convbert_jax.config import from_config_dict
        from convbert_jax.finetuning import fitting
        from convbert_jax.finetuning.fitting import Programs
        from convbert_jax.recipes import finetuning as recipe
        from convbert_jax.training import environment

        data = public_data.folder()
        values, _ = configs.start("speed", "cola", ("cola",))
        for field, value in importlib.import_module(f"configs.{size}").get_config().model.items():
            values.model[field] = value
        values.model.positions = 512
        values.tokenizer.kind = "wordpiece"
        values.tokenizer.path = str(data / "vocab" / "bert-base-uncased-vocab.txt")
        values.finetune.tasks = ("cola",)
        values.finetune.data = str(data / "glue")
        values.finetune.train_rows = rows
        self.config, self.tokenizer, _ = recipe.read_start(from_config_dict(values))
        environment.enable_compile_cache(self.config.train.compile_cache)
        mesh = recipe.make_mesh(self.config, jax.devices())
        self.programs = Programs(self.config, jnp.float32, mesh)
        (make,) = recipe.open_tasks(self.config, self.tokenizer)
        self.task = make()
        self.dev = self.task.evaluation["validation"]
        self.fitting = fitting
        params = self.programs.new_params(self.task, 0)
        self.start = jax.device_get(params)
        self.weights = {name: part for name, part in self.start.items() if name != "head"}

    def train(self, seeds, vectorized: bool):
        """Returns runs trained for one epoch."""
        setting = self.fitting.Setting(3e-4, 1.0)
        return self.fitting.fit(
            self.programs, self.task, self.config, setting, seeds, self.weights,
            vectorized=vectorized,
        )  # fmt: skip

    def predict(self, params, vectorized: bool):
        """Returns outputs for the dev set."""
        found = self.fitting.predict(
            self.programs, self.task, self.config, params, "validation", vectorized=vectorized
        )
        return [collected.predicted() for collected in found]


def compare_seeds(ours: Ours):
    """Yields (work, programs that take turns), the baseline last."""
    together = ours.train(SEEDS, True)
    alone = [ours.train([seed], False) for seed in SEEDS]
    yield (
        "train",
        {
            "together": lambda: ours.train(SEEDS, True),
            "in turn": lambda: [ours.train([seed], False) for seed in SEEDS],
        },
    )
    yield (
        "predict",
        {
            "together": lambda: ours.predict(together.params, True),
            "in turn": lambda: [ours.predict(run.params, False) for run in alone],
        },
    )


def compare_pytorch(ours: Ours):
    """Yields (work, programs that take turns), the baseline last."""
    theirs = Theirs(ours)
    check_logits(ours, theirs)
    params = ours.train([0], False).params
    yield (
        f"train {len(ours.task.train):,} examples",
        {
            "ours": lambda: ours.train([0], False),
            "PyTorch": lambda: theirs.train(0),
        },
    )
    yield (
        f"predict {len(ours.dev):,} examples",
        {
            "ours": lambda: ours.predict(params, False),
            "PyTorch": theirs.predict,
        },
    )


class Theirs:
    """Hugging Face's class with the same initial weights, in a loop like its Trainer's."""

    def __init__(self, ours: Ours):
        import torch
        import transformers

        from convbert_jax.interop import huggingface
        from convbert_jax.interop.networks import split

        torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
        config = dataclasses.replace(ours.config, outputs=ours.task.outputs)
        with tempfile.TemporaryDirectory() as folder:
            network = split(config, ours.start)["main"]
            huggingface.write_network(Path(folder), network, pad_id=ours.tokenizer.special.pad)
            load = transformers.ConvBertForSequenceClassification.from_pretrained
            self.model = load(folder, attn_implementation="eager")
        self.torch, self.transformers, self.ours = torch, transformers, ours
        self.start = {name: value.clone() for name, value in self.model.state_dict().items()}

    def batch(self, rows, index):
        """Returns a batch padded to its longest row."""
        length = int(rows.lengths[index].max())
        values = rows.batch(index, length)
        names = {
            "input_ids": "tokens",
            "attention_mask": "segment_ids",
            "token_type_ids": "type_ids",
        }
        batch = {name: self.torch.tensor(values[ours]).long() for name, ours in names.items()}
        return batch | {"labels": self.torch.tensor(values["label"]).long()}

    def train(self, seed: int) -> None:
        torch, rows = self.torch, self.ours.task.train
        self.model.load_state_dict(self.start)
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, eps=1e-6, fused=True)
        size = self.ours.config.finetune.batch_size
        steps = -(-len(rows) // size)
        schedule = self.transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        generator = torch.Generator().manual_seed(seed)
        for index in torch.randperm(len(rows), generator=generator).split(size):
            self.model(**self.batch(rows, index.numpy())).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def predict(self):
        rows, torch = self.ours.dev, self.torch
        self.model.eval()
        with torch.no_grad():
            parts = torch.arange(len(rows)).split(self.ours.config.finetune.eval_batch_size)
            return [self.model(**self.batch(rows, part.numpy())).logits for part in parts]


def check_logits(ours: Ours, theirs: Theirs) -> None:
    """Exits unless logits agree on unpadded rows; Hugging Face's class does not mask padding."""
    import numpy as np

    from convbert_jax.finetuning.fitting import widen_head

    counts = np.bincount(ours.dev.lengths)
    index = np.flatnonzero(ours.dev.lengths == counts.argmax())[:32]
    params = widen_head(ours.start, len(ours.task.outputs.labels), ours.task.width)
    mine = np.asarray(ours.predict(params, False)[0]["logits"])[index, :2]
    theirs.model.eval()
    with theirs.torch.no_grad():
        other = theirs.model(**theirs.batch(ours.dev, index)).logits.numpy()
    if np.abs(mine - other).max() > 1e-4:
        raise SystemExit(f"logits differ by {np.abs(mine - other).max():.1e}; timings are invalid.")


if __name__ == "__main__":
    main()
