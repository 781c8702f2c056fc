"""The compiled steps of fine-tuning: one program for each shape, shared by tasks, seeds and rates.

Whatever differs between runs of one shape is an argument: the seed, the learning rate, what the
outputs mean. A vectorized step takes that of several seeds at once, as one program over arrays
with a leading axis of runs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from convbert_jax.config import Config, OutputsSection
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.models.pretraining import build
from convbert_jax.training.optimizer import layer_multipliers, make_direction
from convbert_jax.training.sharding import BATCH_AXES
from convbert_jax.training.state import fold_in_name

Params = dict[str, Any]


def run_key(seed: jax.Array | int, name: str) -> jax.Array:
    """The key of one purpose in the run of a seed.

    Always Threefry: the generator that TPUs prefer draws other numbers where runs are vectorized.
    """
    return fold_in_name(jax.random.key(seed, impl="threefry2x32"), name)


class Programs:
    """Makes each step once; equal tasks get the same one."""

    def __init__(self, config: Config, dtype: jnp.dtype, mesh: Mesh):
        """`config.model`, `.optimizer` and `.finetune` hold for all tasks."""
        self._config = config
        self._dtype = dtype
        self._mesh = mesh
        self._direction = make_direction(config.optimizer)
        self._made: dict[tuple, Callable] = {}

    def start(self, task: FinetuneTask, vectorized: bool) -> Callable:
        """Compiled params -> state of a run, or of several with a leading axis."""

        def start(params):
            return params, self._direction.init(params)

        start = jax.vmap(start) if vectorized else start
        return self._once(("start", task.width, vectorized), lambda: jax.jit(start))

    def train_step(self, task: FinetuneTask, vectorized: bool) -> Callable:
        """Compiled (state, batch, constants, seed, step, learning_rate) -> (state, loss).

        `state` is (parameters, optimizer state) and is donated. Vectorized, state, batch, seed and
        loss have a leading axis of runs.
        """
        graphdef, sum_loss = self._graphdef(task), self._config.finetune.sum_loss
        decay = self._config.finetune.layer_decay

        def loss(params, batch, key):
            model = nnx.merge(graphdef, params)
            losses, weights = task.losses(model, batch, key, dtype=self._dtype)
            total = jnp.sum(losses * batch["weight"])
            if sum_loss:
                return total
            return total / jnp.maximum(jnp.sum(weights * batch["weight"]), 1e-6)

        def step(state, batch, constants, seed, step, learning_rate):
            params, opt_state = state
            key = jax.random.fold_in(run_key(seed, "loss"), step)
            value, gradients = jax.value_and_grad(loss)(params, {**batch, **constants}, key)
            updates, opt_state = self._direction.update(gradients, opt_state, params)
            rates = layer_multipliers(params, decay)
            params = jax.tree.map(
                lambda p, u, rate: p - learning_rate * rate * u, params, updates, rates
            )
            return (params, opt_state), value

        if vectorized:
            step = jax.vmap(step, in_axes=(0, 0, None, 0, None, None))
        key = ("train", task.losses, task.outputs.head, task.width, vectorized)
        return self._once(key, lambda: jax.jit(step, donate_argnums=0))

    def predict_step(self, task: FinetuneTask, vectorized: bool) -> Callable:
        """Compiled (params, batch, constants) -> outputs; vectorized over parameters only."""
        graphdef = self._graphdef(task)

        def predict(params, batch, constants):
            model = nnx.merge(graphdef, params)
            return task.predict(model, {**batch, **constants}, dtype=self._dtype)

        if vectorized:
            predict = jax.vmap(predict, in_axes=(0, None, None))
        key = ("predict", task.predict, task.outputs.head, task.width, vectorized)
        return self._once(key, lambda: jax.jit(predict))

    def new_params(self, task: FinetuneTask, seed: int) -> Params:
        """Random parameters of the whole model, with the head as wide as its labels."""
        _, init = build(FinetunedModel, self._with_outputs(task.outputs))
        key = ("init", task.outputs.head, len(task.outputs.labels))
        return self._once(key, lambda: jax.jit(init))(run_key(seed, "init"))

    def new_head(self, task: FinetuneTask, seed: int) -> Params:
        """The head of `new_params` alone: the same numbers for less work."""
        _, init = build(FinetunedModel, self._with_outputs(task.outputs))
        key = ("head", task.outputs.head, len(task.outputs.labels))
        make = self._once(key, lambda: jax.jit(lambda key: init(key)["head"]))
        return make(run_key(seed, "init"))

    def put(self, arrays, *, runs: bool = False):
        """Host arrays with a batch axis, behind an axis of runs or not, divided over devices."""
        if self._mesh.size == 1:
            return arrays
        axes = (None, BATCH_AXES) if runs else (BATCH_AXES,)
        return jax.device_put(arrays, NamedSharding(self._mesh, PartitionSpec(*axes)))

    def replicate(self, tree):
        """A tree on all devices."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def count_compiled(self) -> int:
        """Programs compiled or read from the cache so far."""
        return sum(function._cache_size() for function in self._made.values())

    def _graphdef(self, task: FinetuneTask) -> nnx.GraphDef:
        outputs = dataclasses.replace(task.outputs, labels=("",) * task.width)
        return build(FinetunedModel, self._with_outputs(outputs))[0]

    def _with_outputs(self, outputs: OutputsSection) -> Config:
        return dataclasses.replace(self._config, outputs=outputs)

    def _once(self, key: tuple, make: Callable) -> Callable:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def widen_head(params: Params, labels: int, width: int) -> Params:
    """The last layer of the head with `width` outputs, those beyond `labels` of zeros.

    They stay zero: their logits are masked, so no gradient reaches them, and decay keeps zeros.
    """
    return _with_output(params, lambda leaf: _pad_last(leaf, width - labels))


def narrow_head(params: Params, labels: int) -> Params:
    """The way back."""
    return _with_output(params, lambda leaf: leaf[..., :labels])


def _with_output(params: Params, change: Callable) -> Params:
    head = params["head"]
    if "output" not in head:
        return params
    return {**params, "head": {**head, "output": jax.tree.map(change, head["output"])}}


def _pad_last(leaf, more: int):
    return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, more)])
