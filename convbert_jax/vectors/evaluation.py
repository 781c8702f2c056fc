"""Scores of text vectors: similarity of pairs (STS), retrieval and clusters."""

import csv
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convbert_jax.config import ParallelSection
from convbert_jax.data.errors import DataError, Location
from convbert_jax.data.readers.pair_sources import open_pairs
from convbert_jax.data.readers.rows import Fault, open_bytes, parse_object, read_errors
from convbert_jax.inference.model import Model
from convbert_jax.inference.search import most_similar, normalize
from convbert_jax.objectives.metrics import Ranks, spearman

CUTS = (1, 3, 5, 10, 100)  # of recall@k
NDCG_AT = MRR_AT = 10


def read_rows(source: str, section: ParallelSection, *, scored: bool) -> list[tuple]:
    """Reads all rows of a source of `open_pairs`: (first, second, score), or (first, second).

    Raises:
      DataError: `section` does not name two texts, a row is unreadable, or there is none.
    """
    if len(section.columns) not in (0, 2):
        named = ",".join(section.columns)
        raise DataError(
            f"--columns={named} names {len(section.columns)} columns; name two.", value=named
        )
    opened = open_pairs(source, section, "scored" if scored else "each")
    rows = []
    for unit in opened.units:
        for number, row in opened.pairs(unit):
            if isinstance(row, Fault):
                raise opened.place(number, row.file).error(f"{row.problem}. Correct it.")
            rows.append(row)
    if not rows:
        raise DataError(f"{source} has no rows.", value=source)
    return rows


def score_similarity(model: Model, pairs: Sequence[tuple[str, str, float]]) -> dict[str, float]:
    """Compares the cosines of pairs with their scores.

    Returns:
      Correlations of Spearman and Pearson, from -1 to 1. If there are two scores, as 0 and 1 for
      paraphrases, instead the average precision of the higher one, and the accuracy with the best
      threshold of the cosine.
    """
    first, second, scores = zip(*pairs, strict=True)
    first, second = (normalize(model.encode(list(side))) for side in (first, second))
    cosines, scores = (first * second).sum(axis=1), np.asarray(scores, np.float64)
    if len(np.unique(scores)) == 2:
        return _score_two_classes(cosines, scores == scores.max())
    return {
        "spearman": spearman([Ranks(cosines, scores, np.ones(len(scores), bool))]),
        "pearson": float(np.corrcoef(cosines, scores)[0, 1]),
    }


def _score_two_classes(cosines: np.ndarray, positive: np.ndarray) -> dict[str, float]:
    from sklearn.metrics import average_precision_score

    order = np.argsort(-cosines, kind="stable")
    # right[n]: rows that are right if the n most similar ones count as positive
    right = np.cumsum([np.sum(~positive), *np.where(positive[order], 1, -1)])
    ends = np.append(np.flatnonzero(np.diff(cosines[order])) + 1, len(cosines))  # not within ties
    return {
        "average_precision": float(average_precision_score(positive, cosines)),
        "accuracy": float(max(right[0], right[ends].max()) / len(cosines)),
    }


def score_clusters(model: Model, rows: Sequence[tuple[str, str]], seed: int = 0) -> float:
    """Clusters texts by k-means and compares the clusters with labels.

    Args:
      rows: (text, label); there are as many clusters as labels.

    Returns:
      The V-measure, from 0 to 1 (Rosenberg & Hirschberg, 2007).
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score

    texts, labels = zip(*rows, strict=True)
    vectors = normalize(model.encode(list(texts)))
    means = KMeans(len(set(labels)), n_init=10, random_state=seed)
    return float(v_measure_score(labels, means.fit_predict(vectors)))


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """A retrieval test set.

    Attributes:
      documents: text of each document by its id.
      queries: text of each query by its id.
      relevant: query id -> relevance of documents by id, at least 1; the rest is not relevant.
    """

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, int]]


def read_retrieval(folder: Path, split: str = "test") -> Retrieval:
    """Reads a folder in BEIR's layout.

    corpus.jsonl has `_id`, `title` (optional) and `text`; queries.jsonl has `_id` and `text`; and
    qrels/SPLIT.tsv has the columns query-id, corpus-id and score. Files may end in .gz. Queries
    without a relevant document are left out.

    Raises:
      DataError: a file is missing or has a bad line, or no query has a relevant document.
    """
    documents = {}
    for number, row in _read_lines(_find(folder, "corpus.jsonl")):
        text = f"{row.get('title') or ''} {row['text']}".strip()
        _add(documents, row["_id"], text, Location(folder / "corpus.jsonl", number))
    queries = {}
    for number, row in _read_lines(_find(folder, "queries.jsonl")):
        _add(queries, row["_id"], row["text"], Location(folder / "queries.jsonl", number))
    path = _find(folder, f"qrels/{split}.tsv")
    relevant: dict[str, dict[str, int]] = {}
    with read_errors(path), open_bytes(path) as file:
        lines = csv.reader((line.decode("utf-8") for line in file), delimiter="\t", quoting=3)
        for number, cells in enumerate(lines, start=1):
            if number == 1:
                continue
            place = Location(path, number)
            try:
                query, document, score = cells
                score = int(score)
            except ValueError:
                raise place.error(
                    f"has {len(cells)} cells ({' '.join(cells)[:60]}), expected a query id, a "
                    "document id and a whole number, separated by tabs. Correct it."
                ) from None
            for kind, key, known in (("query", query, queries), ("document", document, documents)):
                if key not in known:
                    raise place.error(f"names the {kind} {key}, which does not exist. Remove it.")
            if score > 0:
                relevant.setdefault(query, {})[document] = score
    if not relevant:
        raise DataError(f"{path} has no query with a relevant document.", path=path)
    return Retrieval(documents, {query: queries[query] for query in relevant}, relevant)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{folder} has no {name}; a folder in BEIR's layout has corpus.jsonl, queries.jsonl and "
        "qrels/SPLIT.tsv.",
        path=folder / name,
    )


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with read_errors(path), open_bytes(path) as file:
        for number, line in enumerate(file, start=1):
            row = parse_object(line.decode("utf-8", "replace"), "utf-8")
            place = Location(path, number)
            if isinstance(row, Fault):
                raise place.error(f"{row.problem}. Correct it.")
            if not isinstance(row.get("_id"), str) or not isinstance(row.get("text"), str):
                raise place.error("has no texts `_id` and `text`. Correct it.")
            yield number, row


def _add(found: dict[str, str], key: str, text: str, place: Location) -> None:
    if key in found:
        raise place.error(f"has the _id {key} of an earlier line. Remove one.")
    found[key] = text


def score_retrieval(
    model: Model, data: Retrieval, reranker: Model | None = None
) -> dict[str, float]:
    """Searches the documents for each query; see `score_rankings`.

    Queries and documents have the model's prompts "query" and "document", if it has them.

    Args:
      reranker: sorts the found documents, see `Model.rerank`.
    """
    names, queries = list(data.documents), list(data.queries)
    documents = model.encode_documents(list(data.documents.values()))
    asked = model.encode_queries([data.queries[query] for query in queries])
    # One more: a query that is a document itself, as in Quora, is not its own answer.
    places, _ = most_similar(asked, documents, max(CUTS) + 1)
    rankings = {
        query: [names[place] for place in row if names[place] != query]
        for query, row in zip(queries, places, strict=True)
    }
    if reranker:
        for query, found in rankings.items():
            hits = reranker.rerank(data.queries[query], [data.documents[name] for name in found])
            rankings[query] = [found[hit.place] for hit in hits]
    return score_rankings(rankings, data.relevant)


def score_rankings(
    rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, int]]
) -> dict[str, float]:
    """Scores rankings as trec_eval does; means over queries.

    nDCG@10 has the relevance as gain and log2(rank + 1) as discount (Järvelin & Kekäläinen, 2002);
    MRR@10 is the mean of 1 / rank of the first relevant document, 0 beyond rank 10; recall@k is the
    share of the relevant documents among the first k.

    Args:
      rankings: query -> documents, the best first.
      relevant: query -> relevance of documents; all other documents are not relevant.
    """
    sums = dict.fromkeys((f"ndcg@{NDCG_AT}", f"mrr@{MRR_AT}", *(f"recall@{k}" for k in CUTS)), 0.0)
    for query, ranking in rankings.items():
        gains = [relevant[query].get(document, 0) for document in ranking]
        best = sorted(relevant[query].values(), reverse=True)
        sums[f"ndcg@{NDCG_AT}"] += _discounted(gains[:NDCG_AT]) / _discounted(best[:NDCG_AT])
        first = next((rank for rank, gain in enumerate(gains[:MRR_AT], start=1) if gain), math.inf)
        sums[f"mrr@{MRR_AT}"] += 1 / first
        for k in CUTS:
            sums[f"recall@{k}"] += sum(gain > 0 for gain in gains[:k]) / len(best)
    return {name: total / len(rankings) for name, total in sums.items()}


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))
