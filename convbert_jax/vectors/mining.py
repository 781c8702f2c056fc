"""Training pairs: with hard negatives, and from texts with classes."""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from convbert_jax.config import UserError
from convbert_jax.inference.model import Model
from convbert_jax.inference.search import most_similar, normalize


def pair_classes(
    rows: Sequence[tuple[str, str]], seed: int = 0
) -> Iterator[tuple[str, str, float]]:
    """Yields (text, text of the same class, 1) and (text, text of another class, 0) of each text.

    Scored pairs instead of pairs with negatives from the batch, where texts of the same class would
    count as negatives. A text that is alone in its class has no first pair.

    Args:
      rows: (text, class).

    Raises:
      UserError: there are fewer than two classes.
    """
    texts: dict[str, list[str]] = {}
    for text, label in dict(rows).items():
        texts.setdefault(label, []).append(text)
    if len(texts) < 2:
        raise UserError("The texts have one class. Use texts of at least two classes.")
    draw = random.Random(seed)
    for text, label in dict(rows).items():
        two = draw.sample(texts[label], min(2, len(texts[label])))
        for same in [each for each in two if each != text][:1]:
            yield text, same, 1.0
        other = draw.choice([name for name in texts if name != label])
        yield text, draw.choice(texts[other]), 0.0


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
