"""Hard negatives: texts that a model finds similar to a query, although they are not its answer."""

from collections.abc import Iterator, Sequence

import numpy as np

from convbert_jax.inference.model import Model
from convbert_jax.inference.search import most_similar, normalize


def mine(
    model: Model,
    pairs: Sequence[tuple[str, str]],
    *,
    candidates: int = 50,
    below: float = 0.95,
) -> Iterator[tuple[str, str, str]]:
    """Yields (query, answer, hard negative) of each pair for which a hard negative was found.

    The hard negative is the most similar answer of another query whose cosine is less than `below`
    times the cosine of the right answer, which leaves out most texts that would also be right
    (Moreira et al., 2024, arXiv 2407.15831, TopK-PercPos).

    Args:
      candidates: number of most similar answers that are considered.
    """
    queries, answers = ([pair[side] for pair in pairs] for side in (0, 1))
    texts = list(dict.fromkeys(answers))
    right: dict[str, set[str]] = {}
    for query, answer in pairs:
        right.setdefault(query, set()).add(answer)
    asked, known = model.encode_queries(queries), model.encode_documents(texts)
    places, scores = most_similar(asked, known, candidates)
    number = {text: place for place, text in enumerate(texts)}
    known, asked = normalize(known), normalize(asked)
    for row, (query, answer) in enumerate(pairs):
        most = below * float(np.dot(asked[row], known[number[answer]]))
        for place, score in zip(places[row], scores[row], strict=True):
            text = texts[place]
            if score < most and text not in right[query] and text != query:
                yield query, answer, text
                break
