"""From a model that goes on one token at a time to texts: greedy, sampled, or by beam search.

All is on the device with static shapes, as functions of a step function

    step(tokens [R], state, place) -> (logits [R, V] of the next token, state)

whose state is a pytree of arrays with an axis of rows first; nothing here knows a model. A loop
ends when every row has, and what a row gives out does not depend on its neighbors.

Axes: B rows, K beams, P tokens of a prompt, L length, V vocabulary.

one_by_one.py  greedy and sampling
beam.py        beam search with a length penalty, n best with scores
"""

from convbert_jax.decoding.beam import Hypotheses, search
from convbert_jax.decoding.one_by_one import Texts, greedy, sample

__all__ = ["Hypotheses", "Texts", "greedy", "sample", "search"]
