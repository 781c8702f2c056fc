"""Scores language models on minimal pairs, such as BLiMP (Warstadt et al., 2020).

python -m convbert_jax.minimal_pairs --model=runs/mine --folder=blimp

A model is right about a pair if the acceptable sentence is more probable than the other one. Equal
probabilities count as wrong, and their number is printed. Masked language models are scored by
pseudo-log-likelihood, discriminators by the probability that all tokens are original, and causal
language models by their log probability; see `Model.log_likelihood`.
"""

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from convbert_jax import console

with console.missing_package_message():
    import numpy as np
    from tqdm import tqdm

    from convbert_jax import storage
    from convbert_jax.config import UserError
    from convbert_jax.data.errors import DataError, Location
    from convbert_jax.data.readers.rows import Fault, open_bytes, parse_object, read_errors

_FIELDS = ("sentence_good", "sentence_bad")


@dataclasses.dataclass(frozen=True)
class Paradigm:
    """Minimal pairs of one phenomenon, one file.

    Attributes:
      name: name of the file.
      term: linguistic term of the group that it belongs to.
      pairs: (acceptable, unacceptable) sentences.
    """

    name: str
    term: str
    pairs: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Score:
    """Result of a paradigm: pairs, and how many were right and equal."""

    paradigm: Paradigm
    right: int
    ties: int

    @property
    def accuracy(self) -> float:
        return self.right / len(self.paradigm.pairs)


def read(folder: Path, limit: int = 0) -> list[Paradigm]:
    """Reads NAME.jsonl or NAME.jsonl.gz files with `sentence_good` and `sentence_bad`.

    Args:
      limit: first pairs of each file; 0: all.

    Raises:
      DataError: there is no such file, or a line is invalid.
    """
    paths = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not paths:
        raise DataError(
            f"{folder} has no .jsonl or .jsonl.gz file with minimal pairs.", path=folder
        )
    return [_read_file(path, limit) for path in paths]


def _read_file(path: Path, limit: int) -> Paradigm:
    pairs, term = [], ""
    with read_errors(path), open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            row = parse_object(line.decode("utf-8", "replace"))
            good = not isinstance(row, Fault) and all(
                isinstance(row.get(name), str) and row[name].strip() for name in _FIELDS
            )
            if not good:
                problem = (
                    row.problem if isinstance(row, Fault) else f"has no {' and '.join(_FIELDS)}"
                )
                raise Location(path, number).error(f"{problem}. Correct it.")
            term = term or str(row.get("linguistics_term", ""))
            pairs.append(tuple(row[name] for name in _FIELDS))
            if len(pairs) == limit:
                break
    if not pairs:
        raise DataError(f"{path} is empty.", path=path)
    return Paradigm(path.name.removesuffix(".gz").removesuffix(".jsonl"), term, tuple(pairs))


def score(model, paradigms: Sequence[Paradigm], by: str) -> list[Score]:
    """Scores paradigms with a progress bar.

    Args:
      model: as returned by `convbert_jax.load`.
      by: one of `model.likelihoods`.
    """
    scores = []
    for paradigm in tqdm(paradigms, desc=by, unit="file", leave=False, disable=None):
        texts = list(dict.fromkeys(text for pair in paradigm.pairs for text in pair))
        values = dict(zip(texts, model.log_likelihood(texts, by=by), strict=True))
        good, bad = np.array([[values[text] for text in pair] for pair in paradigm.pairs]).T
        scores.append(Score(paradigm, int((good > bad).sum()), int((good == bad).sum())))
    return scores


def mean_accuracy(scores: Sequence[Score]) -> float:
    """Returns the mean over paradigms, BLiMP's overall accuracy."""
    return statistics.mean(each.accuracy for each in scores)


def describe(scores: dict[str, list[Score]]) -> str:
    """Returns a Markdown table of accuracies by term; a column for each kind of likelihood."""
    lines = [f"| term | pairs | {' | '.join(scores)} |", f"|---|---:{'|---:' * len(scores)}|"]
    groups: dict[str, list[int]] = {}
    for place, each in enumerate(next(iter(scores.values()))):
        groups.setdefault(each.paradigm.term or each.paradigm.name, []).append(place)
    everything = list(range(sum(map(len, groups.values()))))
    for term, places in (*sorted(groups.items()), ("**mean of files**", everything)):
        columns = [[found[place] for place in places] for found in scores.values()]
        pairs = sum(len(each.paradigm.pairs) for each in columns[0])
        cells = (f"{100 * mean_accuracy(column):.1f}" for column in columns)
        lines.append(f"| {term} | {pairs:,} | {' | '.join(cells)} |")
    ties = (f"{sum(each.ties for each in found):,} by {by}" for by, found in scores.items())
    return "\n".join([*lines, f"\nEqual probabilities, counted as wrong: {', '.join(ties)}."])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m convbert_jax.minimal_pairs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="Run or Hugging Face folder.")
    parser.add_argument("--folder", type=Path, required=True, help="Folder of .jsonl files.")
    parser.add_argument("--limit", type=int, default=0, help="First pairs of each file; 0: all.")
    parser.add_argument("--step", type=int, help="Step of the checkpoint of a run.")
    parser.add_argument("--output", default="", help="JSON file with the accuracy of each file.")
    options = parser.parse_args()
    with console.missing_package_message():
        console.set_up_logging()
        from convbert_jax.inference.loading import load
    try:
        paradigms = read(options.folder, options.limit)
        model = load(options.model, step=options.step)
        if not model.likelihoods:
            raise UserError(
                f"{options.model} gives no probabilities of texts. Use a pre-training run, or a "
                "folder that was exported with its heads."
            )
        scores = {by: score(model, paradigms, by) for by in model.likelihoods}
        print(describe(scores), flush=True)
        if options.output:
            found = {
                by: {each.paradigm.name: each.accuracy for each in of_kind}
                for by, of_kind in scores.items()
            }
            storage.write_json(storage.to_path(options.output), found)
    except UserError as error:
        console.fail(str(error))


if __name__ == "__main__":
    main()
