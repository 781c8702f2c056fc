"""Speed of whole training programs on a CPU: ours, Hugging Face's Trainer and rtd-gdes.

    python -m benchmarks.speed.trainers --sizes tiny small --rounds 3 --threads 1

All programs train on the same rows of `enwiki` (128 tokens, no padding, WordPiece of 30,522 words)
with AdamW, clipping, dropout 0.1 and float32. Each step masks 15% of the tokens: 80% [MASK], 10%
random, 10% unchanged. In each turn a program starts from random weights and is timed from the end
of its first step to the end of its last step, with reading and masking.

- bert, convbert: recipe masked_lm against transformers' Trainer as run_mlm.py uses it. Its models
  compute the logits of all tokens, ours only of masked ones.
- rtd: recipe replaced_token with config.generator.kind=shared against model and loop of rtd-gdes
  0.1.4.1: one network is generator and discriminator. In rtd-gdes the discriminator's loss does not
  train the embeddings, all tokens are replaced by the most likely ones, and all [MASK] positions
  are labelled as replaced. It supports only DeBERTa, here without relative attention. Its command
  line reads only texts with labels of the package datasets, so this script passes it the rows.
- rtd_disentangled: with config.generator.disentangle_embeddings, which requires a separate
  generator, here of full size: as many layers to compute, but twice the parameters.

Prints medians of tokens per second, and our speed divided by the peer's over rounds; above 1 ours
is faster. With one thread, times are processor times. Needs the data folder (CONVBERT_DATA), torch,
transformers, accelerate and for rtd rtd-gdes. quality/embedding.py times sentence-transformers.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

import convbert_jax
from benchmarks import public_data, timing
from convbert_jax.machine import keep_memory

ROWS, LENGTH = 16, 128
RTD = {"recipe": "replaced_token", "model.mixer": "attention"}
FULL = {"kind": "separate", "size": 1.0, "layers": 1.0, "disentangle_embeddings": True}
MODELS = {  # model -> fields of the config
    "bert": {"recipe": "masked_lm", "model.mixer": "attention"},
    "convbert": {"recipe": "masked_lm"},
    "rtd": {**RTD, "generator": {"kind": "shared"}},
    "rtd_disentangled": {**RTD, "generator": FULL},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sizes", nargs="+", default=["small"], choices=("tiny", "small"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    keep_memory()
    timing.take_threads(options.threads)
    timing.use("cpu")
    import jax
    import torch
    from absl import logging

    from convbert_jax.interop.networks import abstract_params

    logging.set_verbosity(logging.WARNING)
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    print(f"{ROWS} x {LENGTH} tokens, {timing.describe_processor()}")
    table = timing.Table("size", "model", "peer", "parameters of peer", "ours", "tokens/s of peer",
                         "ours", "ours / peer")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for size, name in itertools.product(options.sizes, options.models):
            config = make_config(name, size, options.steps, Path(folder))
            kind = MaskedLM if config.recipe == "masked_lm" else ReplacedToken
            peer = kind(config, Path(folder))
            turns = [(time_ours(config, clock), peer.time(clock)) for _ in range(options.rounds)]
            ours, theirs = zip(*turns, strict=True)
            table.add(
                size, name, kind.program, sum(p.numel() for p in peer.make().parameters()),
                sum(leaf.size for leaf in jax.tree.leaves(abstract_params(config))),
                *(ROWS * LENGTH / statistics.median(seconds) for seconds in (theirs, ours)),
                timing.describe_ratios(ours, theirs),
            )  # fmt: skip


def make_config(name: str, size: str, steps: int, folder: Path):
    """Returns the config of a run with one step more than `steps`."""
    texts = public_data.folder("pretrain/enwiki-2015/valid")
    vocabulary = public_data.folder("vocab") / "bert-base-uncased-vocab.txt"
    fields = {
        "compute_dtype": "float32",
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
        "objective.mask_fraction": 0.15,
        "objective.mask_token_fraction": 0.8,
        "objective.random_token_fraction": 0.1,
        "optimizer.method": "adamw",
        "tokenizer": {"kind": "wordpiece", "path": str(vocabulary), "vocab_size": 30_522},
        "data": {"source": f"text:{texts}/*", "directory": str(folder / "data"), "length": LENGTH},
        "train": {"steps": steps + 1, "log_every": steps + 1, "batch_size": ROWS,
                  "eval_rows": ROWS, "warn_health": False},
        **MODELS[name],
    }  # fmt: skip
    if name != "convbert":  # BERT and DeBERTa have one width
        fields["model.embedding_size"] = {"tiny": 128, "small": 256}[size]
    return convbert_jax.load_config(f"configs/{size}.py", **fields)


def time_ours(config, clock) -> float:
    """Returns the seconds per step that the log of a run shows, measured by `clock`."""
    with tempfile.TemporaryDirectory() as workdir, mock.patch("time.perf_counter", clock):
        lines = convbert_jax.pretrain(config, workdir).metrics
    (seconds,) = (line["seconds_per_step"] for line in lines if line["split"] == "train")
    return seconds


class MaskedLM:
    """BertForMaskedLM or ConvBertForMaskedLM in transformers' Trainer."""

    program = "Trainer"

    def __init__(self, config, folder: Path):
        import transformers

        from convbert_jax.recipes import tasks
        from convbert_jax.workdir import Workdir

        batches = tasks.open_data(config, Workdir(folder)).training(None)
        rows = [row for _ in range(config.train.steps) for row in next(batches)["tokens"].tolist()]
        batches.close()
        self.rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows]
        self.config, self.folder = config, folder
        self.tokenizer = transformers.BertTokenizerFast(vocab_file=config.tokenizer.path)
        self.collate = transformers.DataCollatorForLanguageModeling(self.tokenizer)

    def make(self):
        from benchmarks.quality.learning_beside_pytorch import make_model

        return make_model(self.config)

    def time(self, clock) -> float:
        """Returns the seconds per step of a new run, without its first step."""
        times = []
        self.train(lambda *_, **__: times.append(clock()))
        return (times[-1] - times[0]) / (len(times) - 1)

    def train(self, end_step) -> None:
        import transformers

        section = self.config.optimizer
        arguments = transformers.TrainingArguments(
            str(self.folder / "trainer"), per_device_train_batch_size=ROWS, num_train_epochs=1,
            learning_rate=section.learning_rate, weight_decay=section.weight_decay, use_cpu=True,
            save_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        timer = type("Timer", (transformers.TrainerCallback,), {"on_step_end": end_step})
        trainer = transformers.Trainer(self.make(), arguments, self.collate, self.rows)
        trainer.add_callback(timer)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()


class ReplacedToken(MaskedLM):
    """DeBERTa in the training loop of rtd-gdes."""

    program = "rtd-gdes"

    def make(self):
        import transformers
        from rtd_gdes.gdes.model import DebertaV3GDES

        sizes = super().make().config.to_dict()
        config = transformers.DebertaV2Config(**sizes | {"model_type": "deberta-v2"})
        transformers.DebertaV2ForMaskedLM(config).save_pretrained(self.folder / "deberta")
        return DebertaV3GDES(str(self.folder / "deberta"))

    def train(self, end_step) -> None:
        import torch
        from rtd_gdes.gdes.trainer import train_one_epoch

        model, section = self.make(), self.config.optimizer
        rates = {"lr": section.learning_rate, "weight_decay": section.weight_decay}
        optimizer = torch.optim.AdamW(model.parameters(), **rates)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        loader = torch.utils.data.DataLoader(self.rows, ROWS, shuffle=True, collate_fn=self.collate)

        def batches():
            for batch in loader:
                yield batch
                end_step()  # the loop asks for the next batch

        train_one_epoch(
            self.tokenizer, batches(), model, 0.5, optimizer, schedule, torch.float32,
            torch.amp.GradScaler(enabled=False), torch.device("cpu"), section.clip_norm,
        )  # fmt: skip


if __name__ == "__main__":
    main()
