"""Compiled programs of fine-tuning: one per shape, shared by tasks, seeds and learning rates.

Everything that differs between runs of one shape is an argument of the steps: the seed, the
learning rate and the task's constants. Several seeds can run in one program over arrays with a
leading axis of runs.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from convbert_jax.config import Config, OutputsSection
from convbert_jax.finetuning.tasks.task import FinetuneTask
from convbert_jax.models.build import build
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.models.mixers import sharding_rules
from convbert_jax.training import sharding
from convbert_jax.training.environment import private_jax
from convbert_jax.training.optimizer import make_told_optimizer
from convbert_jax.training.program import Program, Trainable
from convbert_jax.training.state import fold_in_name
from convbert_jax.training.step import Drawn, Learning
from convbert_jax.training.task import Params


def run_key(seed: jax.Array | int, name: str) -> jax.Array:
    """Return the key for one purpose in a seed's run.

    Always Threefry: with RBG, the preferred generator of TPUs, vectorized runs draw different
    numbers.
    """
    return fold_in_name(jax.random.key(seed, impl="threefry2x32"), name)


class Programs:
    """Makes each program once; tasks of equal shape share it.

    Train steps receive (seed, learning rate, constants of the task). Evaluation receives the
    constants instead of a key. Runs that are trained together have one seed each.
    """

    def __init__(self, config: Config, dtype: jnp.dtype, mesh: Mesh):
        """Create the cache; `config.model`, `.optimizer` and `.finetune` apply to all tasks."""
        self._config = config
        self._dtype = dtype
        self._mesh = mesh
        self._learning = Learning(
            optimizer=make_told_optimizer(config.optimizer, config.finetune.layer_decay),
            draw=_draw,
            given_axes=(0, None, None),
        )
        self._programs: dict[tuple, Program] = {}
        self._starts: dict[tuple, Callable] = {}

    def of(self, task: FinetuneTask, runs: int | None) -> Program:
        """Return the program of a task, for one run or for several with a leading axis.

        Raises:
          ShardingError: The parameters do not fit the mesh.
        """
        key = (task.losses, task.predict, task.outputs.head, task.width, runs)
        if key not in self._programs:
            trainable = self._trainable(task)
            self._programs[key] = Program(trainable, self._learning, self._mesh, runs=runs)
        return self._programs[key]

    def new_params(self, task: FinetuneTask, seed: int) -> Params:
        """Initialize the whole model on the host, with a head as wide as its labels."""
        return self._draw_start(task, seed, "model", lambda params: params)

    def new_head(self, task: FinetuneTask, seed: int) -> Params:
        """Initialize only the head; it equals the head of `new_params`."""
        return self._draw_start(task, seed, "head", lambda params: params["head"])

    def put_constants(self, task: FinetuneTask):
        """Copy `task.constants` to all devices."""
        whole = sharding.replicated(self._mesh)
        return sharding.put_params(dict(task.constants), dict.fromkeys(task.constants, whole))

    def count_compiled(self) -> int:
        """Count functions compiled or loaded from the cache so far."""
        return sum(program.count_compiled() for program in self._programs.values()) + sum(
            map(private_jax.count_compiled, self._starts.values())
        )

    def _trainable(self, task: FinetuneTask) -> Trainable:
        labels = dataclasses.replace(task.outputs, labels=("",) * task.width)
        graphdef, init = build(FinetunedModel, self._with_outputs(labels))
        sum_loss, dtype = self._config.finetune.sum_loss, self._dtype

        def loss(params, batch, key, constants):
            model = nnx.merge(graphdef, params)
            losses, weights = task.losses(model, {**batch, **constants}, key, dtype=dtype)
            total = jnp.sum(losses * batch["weight"])
            if not sum_loss:
                total = total / jnp.maximum(jnp.sum(weights * batch["weight"]), 1e-6)
            return total, {}

        def evaluate(params, batch, constants):
            model = nnx.merge(graphdef, params)
            return task.predict(model, {**batch, **constants}, dtype=dtype)

        rules = (*sharding_rules(self._config.encoder), *sharding.RULES)
        return Trainable(init, loss, evaluate, rules)

    def _draw_start(self, task: FinetuneTask, seed: int, what: str, choose: Callable) -> Params:
        _, init = build(FinetunedModel, self._with_outputs(task.outputs))
        key = (what, task.outputs.head, len(task.outputs.labels))
        if key not in self._starts:
            self._starts[key] = jax.jit(
                lambda key: choose(init(key)), out_shardings=sharding.replicated(self._mesh)
            )
        return jax.device_get(self._starts[key](run_key(seed, "init")))

    def _with_outputs(self, outputs: OutputsSection) -> Config:
        return dataclasses.replace(self._config, outputs=outputs)


def _draw(step, seed, learning_rate, constants) -> Drawn:
    key = jax.random.fold_in(run_key(seed, "loss"), step)
    return Drawn(key, learning_rate, (constants,))


def widen_head(params: Params, labels: int, width: int) -> Params:
    """Pad the head's last layer on the host to `width` outputs, with zeros beyond `labels`.

    They stay zero: masked logits pass no gradient, and weight decay preserves zeros.
    """
    return _with_output(params, lambda leaf: _pad_last(leaf, width - labels))


def narrow_head(params: Params, labels: int) -> Params:
    """Undo `widen_head`."""
    return _with_output(params, lambda leaf: leaf[..., :labels])


def _with_output(params: Params, change: Callable) -> Params:
    head = params["head"]
    if "output" not in head:
        return params
    return {**params, "head": {**head, "output": jax.tree.map(change, head["output"])}}


def _pad_last(leaf, more: int):
    return np.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, more)])
