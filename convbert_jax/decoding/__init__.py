"""From a model that goes on one token at a time to texts: greedy, sampled, or by beam search.

All is on the device with static shapes, as functions of a step function

    step(tokens [R], state, place) -> (logits [R, V] of the next token, state)

whose state is a pytree of arrays with an axis of rows first, or of what is moved and given room in
its own way (state.py); nothing here knows a model, which reads what is given of a text itself, all
but the last token. A loop ends when every row has, and what a row gives out does not depend on its
neighbors.

Axes: B rows, K beams, P tokens of a prompt, L length, V vocabulary.

one_by_one.py  greedy and sampling
beam.py        beam search with a length penalty, n best with scores
prompts.py     what a text begins with, and the best tokens behind it
state.py       states moved among beams, and given room as texts become longer
top_k.py       the largest entries of long rows
"""

from convbert_jax.decoding.beam import Hypotheses, search
from convbert_jax.decoding.one_by_one import Texts, greedy, sample

__all__ = ["Hypotheses", "Texts", "greedy", "sample", "search"]
