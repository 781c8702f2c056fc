"""Pairwise test cases: few cases that cover every pair of parameter values."""

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*factors: Sequence[Any]) -> list[tuple]:
    """Returns rows of one value per factor; any two values of two factors share a row.

    Greedy and deterministic: each row starts with the first missing pair; each other value is the
    one that adds the most missing pairs.
    """
    choices = [range(len(values)) for values in factors]
    missing = {
        ((one, a), (other, b)): None
        for one, other in itertools.combinations(range(len(factors)), 2)
        for a, b in itertools.product(choices[one], choices[other])
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for factor in sorted(set(range(len(factors))) - set(row)):

            def added(value, factor=factor, row=row):
                pairs = (tuple(sorted([(factor, value), item])) for item in row.items())
                return sum(pair in missing for pair in pairs)

            row[factor] = max(choices[factor], key=added)
        for pair in itertools.combinations(sorted(row.items()), 2):
            missing.pop(pair, None)
        rows.append(tuple(values[row[factor]] for factor, values in enumerate(factors)))
    return rows
