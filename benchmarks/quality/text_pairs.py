"""Converts public data to the two columns of configs/text_to_text.py: input and target text.

    python -m benchmarks.quality.text_pairs runs/pairs

Reads sets below CONVBERT_DATA and writes .tsv files with a header:

- trec, agnews, sst2, imdb (text, label): labels as words; TREC has 46 fine ones such as `LOC:city`.
  IMDb reviews are truncated to 100 words. The test sets of AG News and IMDb have 2,000 rows, drawn
  with seed 0. AG News' train has the 10,001 rows in CONVBERT_DATA.
- cogs (source, target, type): variable-free forms. dev and test have logical forms only; theirs are
  computed by `variable_free`, after a check that it reproduces all forms of the training set.
  gen.tsv is complete, gen-CASE.tsv has one case, gen-2100.tsv the first 100 rows of each.
- scan-simple, scan-length (source, target): each action is one letter, so that a token of the
  vocabulary can be a whole action.
"""

import argparse
import csv
import gzip
import random
import re
import sys
from pathlib import Path

from benchmarks import public_data

REVIEW_WORDS, TEST_ROWS = 100, 2_000
POLARITY = ("negative", "positive")
ACTIONS = {
    "I_TURN_LEFT": "L",
    "I_TURN_RIGHT": "R",
    "I_WALK": "W",
    "I_LOOK": "O",
    "I_RUN": "N",
    "I_JUMP": "J",
}
# "* sailor ( x _ 1 )", "dust . agent ( x _ 2 , x _ 1 )" or "bake . agent ( x _ 1 , Emma )"
_NOUN = re.compile(r"(?P<name>(?:\* )?\S+) \( x _ (?P<node>\d+) \)")
_EDGE = re.compile(
    r"(?P<name>\S+) \. (?P<role>\S+(?: \. \S+)?) "
    r"\( x _ (?P<node>\d+) , (?:x _ (?P<argument>\d+)|(?P<word>\S+)) \)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="output folder")
    folder = parser.parse_args().folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, columns, rows in (*classification(), *cogs(), *scan()):
            count = _write(folder / f"{name}.tsv", columns, rows)
            print(f"{folder / name}.tsv: {count:,} rows")
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def classification():
    """Yields (name, columns, rows) of each file of the four classification sets."""
    columns = ("text", "label")
    for split in ("train", "test"):
        rows = (line.split(" ", 1) for line in _lines(f"classification/TREC/{split}.txt", "latin1"))
        yield f"trec-{split}", columns, [(text, label) for label, text in rows]
    for split, file in (("train", "dev"), ("test", "test")):
        rows = _table(f"classification/AGNews/{file}.tsv")
        yield f"agnews-{split}", columns, _draw(rows) if split == "test" else rows
    for split in ("train", "dev"):
        rows = _table(f"glue/SST-2/{split}.tsv")[1:]
        yield f"sst2-{split}", columns, [(text, POLARITY[int(label)]) for text, label in rows]
    for split in ("train", "test"):
        rows = [line.split("\t", 2) for line in _lines(f"classification/IMDb/{split}.tsv")]
        rows = [(_first_words(review), POLARITY[int(label)]) for _, label, review in rows]
        yield f"imdb-{split}", columns, _draw(rows) if split == "test" else rows


def cogs():
    """Yields (name, columns, rows) of each file of COGS (Kim and Linzen, 2020).

    Raises:
      ValueError: a computed form of the training set differs from the given one.
    """
    columns = ("source", "target", "type")
    train = _table("seq2seq/COGS-variable-free/train.tsv")
    logical = _table("seq2seq/COGS/train.tsv")
    for (text, form, kind), (_, wanted, _) in zip(logical, train, strict=True):
        if kind != "primitive" and variable_free(form) != wanted:
            raise ValueError(f"{text!r}: got {variable_free(form)!r}, expected {wanted!r}.")
    yield "cogs-train", columns, train
    for split in ("dev", "test"):
        rows = _table(f"seq2seq/COGS/{split}.tsv")
        yield f"cogs-{split}", columns, [(text, variable_free(f), kind) for text, f, kind in rows]
    cases = {}
    general = _table("seq2seq/COGS-variable-free/gen.tsv")
    for row in general:
        cases.setdefault(row[2], []).append(row)
    yield "cogs-gen", columns, general
    yield "cogs-gen-2100", columns, [row for case in sorted(cases) for row in cases[case][:100]]
    for case, rows in cases.items():
        yield f"cogs-gen-{case}", columns, rows


def scan():
    """Yields (name, columns, rows) of each file of SCAN (Lake and Baroni, 2018)."""
    actions = re.compile("|".join(ACTIONS))
    for split in ("simple", "length"):
        for part in ("train", "test"):
            rows = []
            for line in _lines(f"seq2seq/SCAN/tasks_{part}_{split}.txt"):
                command, steps = line.removeprefix("IN: ").split(" OUT: ")
                rows.append((command, actions.sub(lambda found: ACTIONS[found[0]], steps)))
            yield f"scan-{split}-{part}", ("source", "target"), rows


def variable_free(form: str) -> str:
    """Replaces the variables of a COGS logical form by nouns.

    "* girl ( x _ 1 ) ; cook . agent ( x _ 2 , x _ 1 )" becomes "cook ( agent = * girl )". The event
    that is no argument of another is outermost; roles keep the order of the logical form.

    Raises:
      ValueError: a term is not valid in COGS, or the number of outermost events is not one.
    """
    names, edges, taken = {}, {}, set()
    for term in re.split(r" AND | ; ", form):
        noun, edge = _NOUN.fullmatch(term), _EDGE.fullmatch(term)
        if noun:
            names[noun["node"]] = noun["name"]
        elif edge:
            names.setdefault(edge["node"], edge["name"])
            edges.setdefault(edge["node"], []).append(edge)
            taken.add(edge["argument"])
        else:
            raise ValueError(f"{term!r} is not a valid term of a COGS logical form.")

    def write(node: str) -> str:
        roles = [
            f"{edge['role']} = {write(edge['argument']) if edge['argument'] else edge['word']}"
            for edge in edges.get(node, ())
        ]
        return names[node] + (f" ( {' , '.join(roles)} )" if roles else "")

    outermost = [node for node in edges if node not in taken]
    if len(outermost) != 1:
        raise ValueError(f"{form!r} has {len(outermost)} outermost events; expected one.")
    return write(outermost[0])


def _draw(rows: list) -> list:
    """Draws some of the rows, which may be sorted by label."""
    random.Random(0).shuffle(rows)
    return rows[:TEST_ROWS]


def _first_words(review: str) -> str:
    return " ".join(review.replace("<br />", " ").split()[:REVIEW_WORDS])


def _lines(file: str, encoding: str = "utf-8") -> list[str]:
    path = Path(file)
    place = public_data.folder(str(path.parent)) / f"{path.name}.gz"
    with gzip.open(place, "rt", encoding=encoding, newline="\n") as opened:
        return opened.read().rstrip("\n").split("\n")


def _table(file: str) -> list[list[str]]:
    return [line.split("\t") for line in _lines(file)]


def _write(path: Path, columns, rows) -> int:
    with path.open("w", encoding="utf-8", newline="") as opened:
        writer = csv.writer(
            opened, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, quotechar=None
        )
        writer.writerow(columns)
        writer.writerows([" ".join(cell.split()) for cell in row] for row in rows)
    return len(rows)


if __name__ == "__main__":
    main()
