"""Text generation with a decoding step function: greedy, sampling and beam search.

Everything runs on the device with static shapes, given a step function

    step(tokens [R], state, place) -> (logits [R, V] of the next token, state)

`state` is a pytree whose leaves are arrays with rows on axis 0, or objects with their own `take`
and `resize` (state.py). The step function hides the model, which has already processed all prompt
tokens but the last. Loops end when all rows have ended. The output of a row does not depend on
other rows.

Axes: B rows, K beams, P prompt tokens, L length, V vocabulary.

generation.py  greedy decoding, sampling and beam search
state.py       reordering and resizing of decoding states
"""

from convbert_jax.decoding.generation import Hypotheses, Texts, greedy, sample, search

__all__ = ["Hypotheses", "Texts", "greedy", "sample", "search"]
