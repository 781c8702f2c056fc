"""From a config to the static part of a model and the start of its parameters.

Outside of this package parameters are a plain nested dict of arrays.
"""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

from convbert_jax.config import Config

Params = dict


def build(
    model: Callable[[Config, nnx.Rngs], nnx.Module], config: Config
) -> tuple[nnx.GraphDef, Callable[[Array], Params]]:
    """The static part of a model, and how its parameters start.

    Returns:
      graphdef: `nnx.merge(graphdef, params)` is the model; do it inside of the loss.
      init: key -> parameters, a nested dict of float32 arrays by path; made to be jitted, so that
        with `out_shardings` no device ever holds all of them.
    """

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(model(config, nnx.Rngs(key)), nnx.Param))

    abstract = nnx.eval_shape(lambda: model(config, nnx.Rngs(0)))
    return nnx.graphdef(abstract), init
