"""What a checkpoint holds of the model, and the keys that follow from seed and step."""

import dataclasses
import zlib

import jax
import optax

from convbert_jax.training.task import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that one step turns into the next; randomness is a function of seed and step."""

    step: jax.Array  # int32 scalar, steps done
    params: Params
    opt_state: optax.OptState


def create(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step."""
    return TrainState(jax.numpy.zeros((), jax.numpy.int32), params, optimizer.init(params))


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """A key of its own for every name, the same on every machine."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def step_key(seed: int, step: jax.Array | int, name: str) -> jax.Array:
    """Key of one purpose at one step: fold_in(fold_in(seed, step), name)."""
    return fold_in_name(jax.random.fold_in(jax.random.key(seed), step), name)


def parameter_path(path: tuple) -> str:
    """A JAX key path as `encoder/stages/0/query/kernel`: the dict keys, whatever holds the dict.

    So a parameter has the same path in `params` and in the optimizer's moments.
    """
    keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
    return "/".join(map(str, keys))


def flatten(params: Params) -> dict[str, jax.Array]:
    """Path -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {parameter_path(path): leaf for path, leaf in leaves}


def count(params: Params) -> int:
    """Number of scalars in a tree of arrays or of their shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
