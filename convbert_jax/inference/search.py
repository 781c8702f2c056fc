"""Search for the most similar texts by cosine: exact on the device, or approximate by a graph.

The files of a saved `Index`:

index.json     number of texts and channels
texts.jsonl    the texts, one JSON string per line
vectors.npy    float32 [N, C], of length 1
"""

import functools
import importlib
import json
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax import storage
from convbert_jax.config import UserError
from convbert_jax.data.input_rows import as_single_texts, whole_number
from convbert_jax.interop.sentence_transformers import normalize
from convbert_jax.storage import damaged

_AT_ONCE = 2**26  # similarities that are computed together, 256 MB
_REMEDY = "build the index again"
Encode = Callable[..., np.ndarray]  # texts -> [N, C]


class SearchError(UserError):
    """An index cannot be read or built, or does not belong to the model."""


class Hit(NamedTuple):
    """A found text.

    Attributes:
      place: its number in the index, or in the list of documents.
      score: cosine of its vector and the vector of the query; of `Model.rerank` its own score.
    """

    place: int
    text: str
    score: float


class Index:
    """Texts with their vectors; created by `Model.index`."""

    def __init__(
        self,
        texts: Sequence[str],
        vectors: np.ndarray,
        encode: Encode,
        *,
        approximate: bool = False,
    ):
        """
        Args:
          vectors: [N, C], of any length.
          encode: computes vectors of queries [N, C].
          approximate: see `Model.index`.
        """
        self.texts = tuple(texts)
        self.vectors = normalize(vectors)
        self._encode = encode
        self._graph = Graph(self.vectors) if approximate else None

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"<Index of {len(self):,} texts, {self.vectors.shape[1]} channels>"

    def search(self, queries: str | Sequence[str], k: int = 10) -> list[Hit] | list[list[Hit]]:
        """Finds the `k` most similar texts of each query, the most similar first.

        Returns:
          The hits of a single query, or a list of hits for each query. Fewer than `k` if the index
          has fewer texts.

        Raises:
          ArgumentError: `queries` are not texts, or `k` is not a positive integer.

        >>> hits = model.index(["a text", "another"]).search("a text", k=1)
        >>> hits[0].place, round(hits[0].score, 3)
        (0, 1.0)
        """
        texts, single = as_single_texts(queries)
        k = whole_number("k", k, 1)
        if not texts or not len(self):
            return [] if single else [[] for _ in texts]
        asked = self._encode(texts)
        graph = self._graph
        places, scores = graph.search(asked, k) if graph else most_similar(asked, self.vectors, k)
        found = [
            [Hit(int(p), self.texts[p], float(s)) for p, s in zip(*row, strict=True)]
            for row in zip(places, scores, strict=True)
        ]
        return found[0] if single else found

    def save(self, folder: str | os.PathLike) -> None:
        """Writes texts and vectors to a folder; `Model.load_index` reads it.

        The graph of an approximate index is not written: usearch can crash the process when it
        reads a damaged file. `Model.load_index` builds it again.

        Raises:
          SearchError: the folder has other files, or cannot be written.
        """
        folder = storage.to_path(folder)
        if folder.exists() and not (folder / "index.json").exists() and any(folder.iterdir()):
            raise SearchError(
                f"{folder} has other files. Use a new folder for the index.", path=str(folder)
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "index.json").unlink(missing_ok=True)  # incomplete until it is written again
            with storage.replacing(folder / "vectors.npy") as file:
                np.save(file, self.vectors)
            lines = "".join(f"{json.dumps(text, ensure_ascii=False)}\n" for text in self.texts)
            storage.write_text(folder / "texts.jsonl", lines)
            sizes = {"texts": len(self), "channels": self.vectors.shape[1]}
            storage.write_json(folder / "index.json", sizes)
        except OSError as error:
            raise SearchError(
                f"{folder} cannot be written: {error.strerror}. Use another folder.",
                path=str(folder),
            ) from None


def load(
    folder: str | os.PathLike, of_document: Encode, of_query: Encode, *, approximate: bool
) -> Index:
    """Implements `Model.load_index`.

    Args:
      of_document, of_query: compute vectors of documents and queries [N, C].
    """
    folder = storage.to_path(folder)
    try:
        fields = {"texts": int, "channels": int}
        sizes = storage.read_json(folder / "index.json", remedy=_REMEDY, fields=fields)
        with (folder / "vectors.npy").open("rb") as file:
            vectors = np.load(file, allow_pickle=False)
        lines = (folder / "texts.jsonl").read_bytes().split(b"\n")[:-1]
        texts = [storage.parse_json(line) for line in lines]
    except FileNotFoundError as error:
        raise SearchError(
            f"{folder} has no complete index: {os.path.basename(str(error.filename))} is missing. "
            "Save the index again.",
            path=str(folder),
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise damaged(folder, error, _REMEDY) from None
    shape = (sizes["texts"], sizes["channels"])
    told = all(isinstance(text, str) for text in texts)
    if not told or len(texts) != len(vectors) or vectors.shape != shape:
        raise damaged(folder, f"{len(texts)} texts, vectors of {vectors.shape}", _REMEDY)
    if texts:
        own = of_document([texts[0]])
        same = own.shape[1] == shape[1] and float((normalize(own) @ vectors[:1].T)[0, 0]) > 0.99
        if not same:
            raise SearchError(
                f"{folder} was made by another model: the vector of its first text differs. Load "
                "the model of the index, or build the index again.",
                path=str(folder),
            )
    return Index(texts, vectors, of_query, approximate=approximate)


def import_usearch() -> ModuleType:
    """Imports usearch.

    Raises:
      SearchError: it is not installed.
    """
    try:
        return importlib.import_module("usearch.index")
    except ModuleNotFoundError as error:
        raise SearchError(
            f"approximate=True needs the package {error.name}. Run pip install '.[usearch]'."
        ) from None


class Graph:
    """A graph of near neighbors (HNSW; Malkov & Yashunin, 2018), by usearch on the CPU."""

    def __init__(self, vectors: np.ndarray):
        """
        Args:
          vectors: [N, C], of length 1.
        """
        self._graph = import_usearch().Index(ndim=vectors.shape[1], metric="ip", dtype="f32")
        if len(vectors):
            rows = np.ascontiguousarray(vectors, np.float32)  # a file may have another order
            self._graph.add(np.arange(len(vectors)), rows)

    def search(self, queries: np.ndarray, k: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Like `most_similar`, but may miss vectors; returns a row for each query."""
        found = self._graph.search(normalize(queries), min(k, len(self._graph)))
        found = [found] if len(queries) == 1 else found  # usearch drops the axis of one query
        return [row.keys for row in found], [1 - row.distances for row in found]


def most_similar(queries: np.ndarray, vectors: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the `k` vectors with the largest cosine for each query.

    Args:
      queries: [Q, C].
      vectors: [N, C], N >= 1.

    Returns:
      (numbers [Q, min(k, N)], cosines [Q, min(k, N)]), the largest first.
    """
    k = min(k, len(vectors))
    vectors, queries = jnp.asarray(normalize(vectors)), normalize(queries)
    rows = min(len(queries), max(1, _AT_ONCE // len(vectors)))
    places, scores = [], []
    for start in range(0, len(queries), rows):
        part = queries[start : start + rows]
        part = np.pad(part, ((0, rows - len(part)), (0, 0)))  # one compiled shape
        found = jax.device_get(_top(part, vectors, k))
        scores.append(found[0])
        places.append(found[1])
    return tuple(np.concatenate(each)[: len(queries)] for each in (places, scores))


@functools.partial(jax.jit, static_argnames="k")
def _top(queries: jax.Array, vectors: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    cosines = jnp.matmul(queries, vectors.T, precision=jax.lax.Precision.HIGHEST)
    return jax.lax.top_k(cosines, k)
