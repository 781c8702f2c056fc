"""Text generation with a decoding step function: greedy, sampling and beam search.

Everything runs on the device with static shapes, given a step function

    step(tokens [R], state, place) -> (logits [R, V] of the next token, state)

`state` is a pytree whose leaves are arrays with rows on axis 0, or objects with their own `take`
and `resize` (state.py). The step function hides the model, which has already processed all prompt
tokens but the last. Loops end when all rows have ended. The output of a row does not depend on
other rows.

Axes: B rows, K beams, P prompt tokens, L length, V vocabulary.

one_by_one.py  greedy decoding and sampling
beam.py        beam search with a length penalty; returns the n best with scores
prompts.py     prompts, length limits and the best next tokens
state.py       reordering and resizing of decoding states
top_k.py       fast top-k of long rows
"""

from convbert_jax.decoding.beam import Hypotheses, search
from convbert_jax.decoding.one_by_one import Texts, greedy, sample

__all__ = ["Hypotheses", "Texts", "greedy", "sample", "search"]
