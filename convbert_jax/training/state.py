"""Train state, random keys derived from seed and step, and paths of parameters."""

import dataclasses
import zlib

import jax
import optax

from convbert_jax.training.task import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """State that a training step updates. It has no key: keys derive from seed and step."""

    step: jax.Array  # int32 scalar, steps done
    params: Params
    opt_state: optax.OptState


def create(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Returns the state before the first step."""
    return TrainState(jax.numpy.zeros((), jax.numpy.int32), params, optimizer.init(params))


def fold_in_name(key: jax.Array, name: str) -> jax.Array:
    """Folds the CRC-32 of `name` into `key`; the result is the same on every machine."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def step_key(seed: int, step: jax.Array | int, name: str) -> jax.Array:
    """Returns fold_in(fold_in(seed, step), name), the key for one purpose at one step."""
    return fold_in_name(jax.random.fold_in(jax.random.key(seed), step), name)


def parameter_path(path: tuple) -> str:
    """Joins the dict keys of a JAX key path, for example `encoder/stages/0/query/kernel`.

    Other containers are ignored, so a parameter and its optimizer moments have the same path.
    """
    keys = [part.key for part in path if isinstance(part, jax.tree_util.DictKey)]
    return "/".join(map(str, keys))


def flatten(params: Params) -> dict[str, jax.Array]:
    """Returns path -> leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {parameter_path(path): leaf for path, leaf in leaves}


def count(params: Params) -> int:
    """Counts the scalars in a tree of arrays or `jax.ShapeDtypeStruct`s."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
