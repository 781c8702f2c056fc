"""Scores text vectors, and mines hard negatives.

python -m convbert_jax.vectors similarity --model=runs/vectors --source=csv:sts.csv \\
    --columns=first,second --score_column=score
python -m convbert_jax.vectors retrieval --model=runs/vectors --folder=scifact
python -m convbert_jax.vectors pairs --source=csv:texts.csv --columns=text,topic --output=pairs.csv
python -m convbert_jax.vectors mine --model=runs/vectors --source=csv:pairs.csv \\
    --columns=question,answer --output=triplets.csv
python -m convbert_jax.vectors mteb --model=runs/vectors --tasks=STSBenchmark,SciFact \\
    --output=mteb
"""

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING

from convbert_jax import console

with console.missing_package_message():
    from convbert_jax import storage
    from convbert_jax.config import ParallelSection, UserError
if TYPE_CHECKING:
    from convbert_jax.inference.model import Model


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m convbert_jax.vectors",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = {
        "similarity": "correlation of cosines with scores of pairs (STS), or average precision",
        "retrieval": "nDCG@10, MRR@10 and recall@k on a folder in BEIR's layout",
        "clusters": "V-measure of k-means clusters and labels",
        "mteb": "main scores of tasks of MTEB, with the package mteb",
        "mine": "a csv file of pairs with a hard negative each",
        "pairs": "a csv file of scored pairs from texts with classes",
    }
    parts = {name: commands.add_parser(name, help=what) for name, what in made.items()}
    for name, part in parts.items():
        if name != "pairs":
            part.add_argument(
                "--model", required=True, help="Run or Hugging Face folder, as for `load`."
            )
        if name == "retrieval":
            part.add_argument("--folder", type=Path, required=True, help="Test set.")
            part.add_argument("--split", default="test", help="Name of the file in qrels/.")
            part.add_argument("--reranker", help="Model of pairs that sorts the found documents.")
            continue
        if name == "mteb":
            part.add_argument("--tasks", required=True, help="Names: STSBenchmark,SciFact.")
            part.add_argument("--output", type=Path, required=True, help="Folder for results.")
            continue
        part.add_argument(
            "--source", required=True, help="csv:FILE, tsv:FILE, jsonl:FILE or parquet:GLOB."
        )
        what = "Text and label" if name in ("clusters", "pairs") else "First and second text"
        part.add_argument("--columns", default="", help=f"{what}: first,second.")
    parts["similarity"].add_argument("--score_column", required=True, help="Column of the score.")
    for name in ("mine", "pairs"):
        parts[name].add_argument("--output", type=Path, required=True, help="csv file to write.")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    with console.missing_package_message():
        console.set_up_logging()
        from convbert_jax.vectors import evaluation, mining
    try:
        if options.command == "retrieval":
            data = evaluation.read_retrieval(options.folder, options.split)
            reranker = _load(options.reranker) if options.reranker else None
            _print(evaluation.score_retrieval(_load(options.model), data, reranker))
            return
        if options.command == "mteb":
            _score_tasks(options.model, options.tasks.split(","), options.output)
            return
        columns = tuple(filter(None, options.columns.split(",")))
        scored = getattr(options, "score_column", "")
        section = ParallelSection(columns=columns, score_column=scored)
        rows = evaluation.read_rows(options.source, section, scored=bool(scored))
        if scored:
            _print(evaluation.score_similarity(_load(options.model), rows))
            return
        if options.command == "clusters":
            _print({"v_measure": evaluation.score_clusters(_load(options.model), rows)})
            return
        if options.output.exists():
            raise UserError(f"{options.output} exists. Remove it or use another --output.")
        if options.command == "pairs":
            third, found = "score", list(mining.pair_classes(rows))
            written = f"{len(found):,} pairs of {len(rows):,} texts."
        else:
            third, found = "negative", list(mining.mine(_load(options.model), rows))
            written = f"{len(found):,} of {len(rows):,} pairs with a hard negative."
        with storage.replacing(storage.to_path(options.output), "w") as file:
            csv.writer(file).writerows([("first", "second", third), *found])
        print(f"Wrote {written}")
    except UserError as error:
        console.fail(str(error))


def _load(path: str) -> "Model":
    """Loads an encoder; raises UserError, also for a model that generates texts."""
    from convbert_jax.inference.loading import load
    from convbert_jax.inference.model import Model

    if not isinstance(model := load(path), Model):
        raise UserError(
            f"{path} generates texts and has no text vectors. Use a run or folder of an encoder.",
            field="--model",
            value=path,
        )
    return model


def _score_tasks(path: str, names: list[str], output: Path) -> None:
    try:
        from convbert_jax.vectors import mteb_tasks
    except ModuleNotFoundError as error:
        problem = f"The command mteb needs the package {error.name}. Run pip install '.[mteb]'."
        raise UserError(problem) from None
    for name in names:
        mteb_tasks.get_task(name)  # an unknown one is an error before hours of others
    model = _load(path)
    for name in names:
        _print({name: mteb_tasks.score_task(model, mteb_tasks.get_task(name), output)})


def _print(scores: dict[str, float]) -> None:
    for name, value in scores.items():
        print(f"{name:18} {value:.4f}")


if __name__ == "__main__":
    main()
