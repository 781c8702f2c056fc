"""Gain from pre-training: fine-tuned from a checkpoint, from scratch, bag of words, and PyTorch.

    python -m benchmarks.quality.finetuning_gain --init-from=runs/tiny --folder=runs/gain
    python -m benchmarks.quality.finetuning_gain --init-from=runs/tiny --folder=runs/gain \\
        --tasks CoLA TREC --train-rows=500
    python -m benchmarks.quality.finetuning_gain --init-from=BERT_FOLDER --folder=runs/pytorch \\
        --methods pre-trained pytorch --tasks TREC --train-rows=10000 --learning-rates 3e-4 \\
        --epochs 3 --batch-size=32 --seeds=3

Eight tasks of CONVBERT_DATA (default ../shared/data). All methods use the same training rows,
drawn once, and the same scored rows: dev where GLUE hides its test labels, otherwise test.

- The first two use the same network and recipe. Each chooses its learning rate with one run per
  rate on nine tenths of the training rows, evaluated on the rest; the scored rows select nothing.
- Bag of words: TF-IDF of words and word pairs with logistic regression, its strength chosen by
  cross-validation on the training rows. For text pairs: the features of both and their difference.
- PyTorch, if asked for: transformers' class of a Hugging Face folder with the same head, recipe and
  number of seeds, with transformers' tokenizer and a separate training loop.

Resumable; --methods runs parts. Writes FOLDER/gain.json and FOLDER/gain.png.
"""

import argparse
import dataclasses
import json
import logging
import os
import pathlib
import statistics
import time

import numpy as np

from benchmarks import public_data, timing

SOURCES = {  # title -> (config, task, scored split, metric)
    "CoLA": ("glue", "cola", "validation", "mcc"),
    "SST-2": ("glue", "sst-2", "validation", "accuracy"),
    "MRPC": ("glue", "mrpc", "validation", "accuracy"),
    "SICK": ("text", "sick", "test", "accuracy"),
    "TREC": ("text", "trec", "test", "accuracy"),
    "AG News": ("text", "agnews", "test", "accuracy"),
    "IMDb": ("text", "imdb", "test", "accuracy"),
    "CLINC150": ("text", "clinc150", "test", "accuracy"),
}
EPOCHS = {"CLINC150": 12}  # 13 rows per label in 2,000; other tasks use --epochs
# Without dev rows, these tasks hold out a tenth by a hash of the text, which is excluded from the
# drawn rows. The same hash selects the validation rows for learning rates.
WITHOUT_DEV = ("TREC", "AG News", "IMDb")
NAMES = {"mcc": "Matthews", "accuracy": "accuracy"}
METHODS = ("pre-trained", "from scratch", "bag of words")
PYTORCH = "pytorch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init-from", required=True, help="the pre-trained run")
    parser.add_argument("--folder", required=True, type=pathlib.Path, help="output folder")
    parser.add_argument("--tasks", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--train-rows", type=int, default=2_000)
    parser.add_argument("--score-rows", type=int, default=2_000, help="maximum")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[7e-4, 2e-3])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=(*METHODS, PYTORCH))
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    arguments.folder.mkdir(parents=True, exist_ok=True)

    results = {}
    for title in arguments.tasks:
        files = write_rows(title, arguments)
        results[title] = {"metric": SOURCES[title][3], "split": SOURCES[title][2], **files}
        for method in arguments.methods:
            start = time.perf_counter()
            others = {"bag of words": score_bag_of_words, PYTORCH: finetune_in_pytorch}
            scores = others.get(method, finetune)(title, method, arguments)
            results[title][method] = scores
            print(
                f"{title}, {method}: median {statistics.median(scores):.4f} of "
                f"{[round(score, 4) for score in scores]}  "
                f"({time.perf_counter() - start:.0f} s)",
                flush=True,
            )
        report(results, arguments)  # after each task, because the next may take long
    print_table(results)


def report(results: dict, arguments: argparse.Namespace) -> None:
    settings = vars(arguments) | {"folder": str(arguments.folder)}
    text = json.dumps({"settings": settings, "results": results}, indent=1)
    (arguments.folder / "gain.json").write_text(text)
    draw(results, arguments.folder / "gain.png")


# --- Shared rows ---


def open_source(title: str):
    """Opens the LabelledTask of its config."""
    import importlib

    from convbert_jax.config import from_config_dict
    from convbert_jax.data.tasks import glue, own_task

    module, name, _, _ = SOURCES[title]
    if module == "glue":
        return glue.open_task(name, str(public_data.folder("glue")))
    config = from_config_dict(importlib.import_module(f"configs.{module}").get_config(name))
    folder = str(public_data.folder(public_data.TEXT_FOLDERS[name]))
    return own_task.open_task(dataclasses.replace(config.task, folder=folder))


def folder_of(title: str, arguments: argparse.Namespace) -> pathlib.Path:
    return arguments.folder / title.replace(" ", "")


def write_rows(title: str, arguments: argparse.Namespace) -> dict:
    """Writes train.jsonl and scored.jsonl of a task, drawn with seed 0; returns their rows."""
    source = open_source(title)
    folder = folder_of(title, arguments)
    folder.mkdir(exist_ok=True)
    described = {"labels": source.labels, "texts": source.texts}
    rng = np.random.default_rng(0)
    for name, split, most in (
        ("train", "train", arguments.train_rows),
        ("scored", SOURCES[title][2], arguments.score_rows),
    ):
        examples = source.read(split)
        chosen = np.sort(rng.permutation(len(examples))[:most])
        lines = [
            json.dumps(
                {**dict(zip("ab", examples[i].texts, strict=False)), "label": examples[i].label}
            )
            for i in chosen
        ]
        temporary = folder / f"{name}-{os.getpid()}"  # another process may be reading the file
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(folder / f"{name}.jsonl")
        described[f"{name}_rows"] = f"{len(chosen):,} of {len(examples):,}"
        labels = [examples[i].label for i in chosen]
        described[f"{name}_majority"] = max(map(labels.count, set(labels))) / len(labels)
    return described


def read_rows(title: str, name: str, arguments: argparse.Namespace) -> tuple[list, list[int]]:
    lines = (folder_of(title, arguments) / f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [[row[key] for key in "ab" if key in row] for row in rows], [r["label"] for r in rows]


# --- The methods ---


def finetune(title: str, method: str, arguments: argparse.Namespace) -> list[float]:
    """Returns the final score of every seed."""
    rates = tuple(arguments.learning_rates)
    if len(rates) > 1:
        chosen = run_task(title, method, arguments, rates, seeds=1, validation="")
        rates = (chosen.chosen.learning_rate,)
        print(f"{title}, {method}: learning rate {rates[0]:g} of {arguments.learning_rates}")
    result = run_task(title, method, arguments, rates, arguments.seeds, "scored.jsonl")
    return [run.scores["validation"][SOURCES[title][3]] for run in result.chosen_runs]


def run_task(title, method, arguments, rates: tuple[float, ...], seeds: int, validation: str):
    """Returns the sweep's TaskResult; `validation` "" holds out a tenth of the training rows."""
    from configs import text
    from convbert_jax.config import from_config_dict, to_dict
    from convbert_jax.recipes import finetuning

    source = open_source(title)
    values = to_dict(from_config_dict(text.get_config("own")))
    values["init_from"] = arguments.init_from
    values["task"] |= {
        "name": title.replace(" ", ""),
        "folder": str(folder_of(title, arguments)),
        "train": "train.jsonl",
        "validation": validation,
        "heldout_fraction": 0.19 if title in WITHOUT_DEV else 0.1,
        "texts": tuple("ab"[: source.texts]),
        "labels": tuple(f"{i}={label}" for i, label in enumerate(source.labels)),
        "metrics": (SOURCES[title][3],),
    }
    values["finetune"] |= {
        "from_scratch": method == "from scratch",
        "learning_rates": rates,
        "epochs": (EPOCHS.get(title, arguments.epochs),),
        "seeds": seeds,
        "batch_size": arguments.batch_size,
        "length": arguments.length,
        "buckets": (16, 32, 64),  # most of these texts are short
        "save_models": False,
    }
    name = method.replace(" ", "-") if validation else f"{method.replace(' ', '-')}-rates"
    workdir = folder_of(title, arguments) / name
    return finetuning.finetune(from_config_dict(values), workdir).tasks[0]


def finetune_in_pytorch(title: str, method: str, arguments: argparse.Namespace) -> list[float]:
    """Returns the final score of every seed; uses the first learning rate.

    AdamW with decay 0.01 of matrices, clipping at 1, warm-up over a tenth of the steps and linear
    decay, and learning rates by layer as in `convbert_jax.training.optimizer.layer_multipliers`.
    """
    import torch
    import transformers
    from sklearn.metrics import accuracy_score, matthews_corrcoef

    train, labels = read_rows(title, "train", arguments)
    scored, gold = read_rows(title, "scored", arguments)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.init_from)

    def logits(encoder, head, rows):
        columns = [list(column) for column in zip(*rows, strict=True)]
        inputs = tokenizer(
            *columns, padding=True, truncation=True, max_length=arguments.length,
            return_tensors="pt",
        )  # fmt: skip
        return head(encoder(**inputs).last_hidden_state[:, 0])

    def train_one(seed: int):
        torch.manual_seed(seed)
        encoder = transformers.AutoModel.from_pretrained(
            arguments.init_from, add_pooling_layer=False
        )
        width, count = encoder.config.hidden_size, encoder.config.num_hidden_layers
        layers = [torch.nn.Linear(width, width), torch.nn.Linear(width, len(set(labels)))]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=0.02)
            torch.nn.init.zeros_(layer.bias)
        drop, gelu = torch.nn.Dropout(0.1), torch.nn.GELU()
        head = torch.nn.Sequential(drop, layers[0], gelu, drop, layers[1])
        model = torch.nn.ModuleList([encoder, head]).train()
        groups = []
        for name, weight in model.named_parameters():
            depth = count + 2
            if name.startswith("0."):
                part = name.split(".")
                depth = int(part[3]) + 1 if part[1] == "encoder" else 0
            groups.append(
                {
                    "params": [weight],
                    "lr": arguments.learning_rates[0] * 0.8 ** (count + 2 - depth),
                    "weight_decay": 0.01 if weight.ndim > 1 else 0.0,
                }
            )
        optimizer = torch.optim.AdamW(groups, eps=1e-6)
        size = arguments.batch_size
        steps = int(-(-len(train) // size) * EPOCHS.get(title, arguments.epochs))
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        order = torch.empty(0, dtype=torch.long)
        for _ in range(steps):
            if not len(order):
                order = torch.randperm(len(train))
            index, order = order[:size], order[size:]
            target = torch.tensor([labels[i] for i in index])
            found = logits(encoder, head, [train[i] for i in index])
            torch.nn.functional.cross_entropy(found, target).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            parts = [scored[i : i + 128] for i in range(0, len(scored), 128)]
            return torch.cat([logits(encoder, head, part).argmax(1) for part in parts]).numpy()

    score = {"mcc": matthews_corrcoef, "accuracy": accuracy_score}[SOURCES[title][3]]
    return [float(score(gold, train_one(seed))) for seed in range(arguments.seeds)]


def score_bag_of_words(title: str, method: str, arguments: argparse.Namespace) -> list[float]:
    """Returns one score, without randomness."""
    from scipy import sparse
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import accuracy_score, matthews_corrcoef
    from sklearn.model_selection import GridSearchCV

    train, labels = read_rows(title, "train", arguments)
    scored, gold = read_rows(title, "scored", arguments)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True)
    vectorizer.fit([text for texts in train for text in texts])

    def features(rows):
        columns = [vectorizer.transform(texts) for texts in zip(*rows, strict=True)]
        if len(columns) == 2:
            columns.append(abs(columns[0] - columns[1]))
        return sparse.hstack(columns).tocsr()

    model = LogisticRegression(max_iter=2_000, tol=1e-3)
    search = GridSearchCV(model, {"C": [1.0, 10.0, 100.0]}, cv=3, scoring="accuracy")
    predicted = search.fit(features(train), labels).predict(features(scored))
    score = {"mcc": matthews_corrcoef, "accuracy": accuracy_score}[SOURCES[title][3]]
    return [float(score(gold, predicted))]


# --- Table and figure ---


def print_table(results: dict) -> None:
    """Prints medians x 100, ranges over seeds, and the score of the most frequent label."""
    methods = [m for m in (*METHODS, PYTORCH) if any(m in result for result in results.values())]
    table = timing.Table("task", "scored on", "train rows", *methods, "gain", "one label")
    for title, result in results.items():
        gain = None
        if all(method in result for method in METHODS[:2]):
            medians = [statistics.median(result[method]) for method in METHODS[:2]]
            gain = f"{100 * (medians[0] - medians[1]):+.1f}"
        table.add(
            f"{title}, {NAMES[result['metric']]}",
            f"{'dev' if result['split'] == 'validation' else 'test'}, {result['scored_rows']}",
            result["train_rows"],
            *(_show_scores(result[m]) if m in result else None for m in methods),
            gain,
            0.0 if result["metric"] == "mcc" else 100 * result["scored_majority"],
        )


def _show_scores(scores: list[float]) -> str:
    median = f"{100 * statistics.median(scores):.1f}"
    if len(scores) == 1:
        return median
    return f"**{median}** ({100 * min(scores):.1f} to {100 * max(scores):.1f})"


def draw(results: dict, path: pathlib.Path) -> None:
    """Draws a row per task: medians of the methods as dots, all seeds as thin marks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7.2, 0.62 * len(results) + 1.5), layout="constrained")
    styles = zip((*METHODS, PYTORCH), ("C0", "C1", "0.45", "C3"), "osD^", strict=True)
    for place, (method, color, shape) in enumerate(styles):
        for row, result in enumerate(reversed(results.values())):
            scores = [100 * score for score in result.get(method, ())]
            if scores:
                heights, middle = [row + 0.2 * (1 - place)] * len(scores), statistics.median(scores)
                axis.plot(scores, heights, "|-", ms=7, lw=1.2, color=color)
                axis.plot(middle, heights[0], shape, ms=6, color=color, label=method)
    for row, result in enumerate(reversed(results.values())):
        if result["metric"] != "mcc":
            majority = 100 * result["scored_majority"]
            axis.plot(majority, row, "x", ms=6, color="0.7", label="most frequent label")
    titles = [f"{title}\n{NAMES[result['metric']]}" for title, result in results.items()]
    axis.set_yticks(range(len(titles)), titles[::-1], fontsize=9)
    axis.set_xlabel("score x 100; dots are medians, marks are seeds")
    axis.set_ylim(-0.6, len(titles) - 0.4)
    axis.grid(axis="x", alpha=0.3)
    names = dict(zip(*axis.get_legend_handles_labels()[::-1], strict=True))  # each once
    figure.legend(
        names.values(), names, loc="outside upper center", ncols=4, fontsize=9, frameon=False
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    main()
