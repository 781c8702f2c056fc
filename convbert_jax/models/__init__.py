"""Flax modules; `build` makes the graph definition and the initializer of a model from a config.

Outside of this package, parameters are a plain nested dict of arrays.
"""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

from convbert_jax.config import Config

Params = dict


def build(
    model: Callable[[Config, nnx.Rngs], nnx.Module], config: Config
) -> tuple[nnx.GraphDef, Callable[[Array], Params]]:
    """Build the graph definition and the parameter initializer of a model.

    Returns:
      graphdef: `nnx.merge(graphdef, params)` gives the model; call it inside the loss function.
      init: Maps a key to parameters, a nested dict of float32 arrays by path. Jit it with
        `out_shardings` so that no single device holds all parameters.
    """

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(model(config, nnx.Rngs(key)), nnx.Param))

    abstract = nnx.eval_shape(lambda: model(config, nnx.Rngs(0)))
    return nnx.graphdef(abstract), init
