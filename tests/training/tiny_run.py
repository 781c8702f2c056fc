"""Tiny models, and a run of one: `python -m tests.training.tiny_run WORKDIR --steps=20`."""

import argparse
import contextlib
import dataclasses
import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from convbert_jax import console, interrupts
from convbert_jax.config import Config, UserError
from convbert_jax.interfaces import Evaluator
from convbert_jax.training import distributed, environment, loop, partitioning
from convbert_jax.training.train_step import Task
from convbert_jax.workdir import Workdir

ROWS = 16
FEATURES = 128


class Rows:
    """Endless batches, each determined by its position."""

    def __init__(
        self,
        *,
        features: int = 4,
        poison: int | None = None,
        seconds: float = 0.0,
        hold: int | None = None,
    ):
        self.position = 0
        self.closed = False
        self._features, self._poison, self._seconds = features, poison, seconds
        self._hold = hold

    def __next__(self):
        time.sleep(self._seconds)
        while self.position == self._hold:
            time.sleep(1.0)
        self.position += 1
        rows = rows_of_this_process(make_rows(self.position, self._features))
        if self.position == self._poison:
            rows["x"][3] = np.nan
        return rows

    def metrics(self):
        return {}

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]

    def close(self):
        self.closed = True


def make_rows(seed: int, features: int = 4, rows: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(rows, features)).astype(np.float32)
    return {"x": x, "weight": np.ones(rows, np.float32)}


def rows_of_this_process(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    here = slice(jax.process_index() * ROWS // jax.process_count(), None)
    count = ROWS // jax.process_count()
    return {name: value[here][:count] for name, value in rows.items()}


def evaluation(batches: int = 3, features: int = 4):
    """Returns held-out rows; the last batch has five real rows."""
    return {"": _heldout(batches, features)}


def _heldout(batches: int, features: int):
    for index in range(batches):
        rows = make_rows(10_000 + index, features)
        if index == batches - 1:
            rows["weight"][5:] = 0.0
        yield rows_of_this_process(rows)


def _sums(errors, weight):
    # The second metric is a vector that is summed and never divided here.
    counts = jnp.stack([(errors < 1.0) * weight, (errors >= 1.0) * weight]).sum(1)
    return {"error": ((errors * weight).sum(), weight.sum()), "counts": (counts, counts)}


def _summarize(sums):
    total, weight = sums["error"]
    return {"error": float(total) / float(weight) if weight else float("nan")}


def _add(state, outputs):
    return {"error": np.add(state["error"], outputs["error"])}


EVALUATOR = Evaluator(("error",), lambda: {"error": (0.0, 0.0)}, _add, _summarize)


def linear_task(*, noise: float = 0.1, features: int = 4, health=None) -> Task:
    """Returns a task that fits y = x . kernel + bias to sum(x) + 1; `noise` is added to x."""

    def errors(params, x):
        prediction = x @ params["dense"]["kernel"] + params["dense"]["bias"]
        return (prediction - x.sum(1) - 1.0) ** 2

    def loss(params, batch, key):
        x = batch["x"] + noise * jax.random.normal(key, batch["x"].shape)
        error = errors(params, x)
        return error.mean(), _sums(error, batch["weight"])

    def init(key):
        return {"dense": {"kernel": jax.random.normal(key, (features,)), "bias": jnp.zeros(())}}

    return Task(
        init=init,
        loss=loss,
        evaluate=lambda params, batch, key: _sums(errors(params, batch["x"]), batch["weight"]),
        rules=partitioning.RULES,
        summarize=_summarize,
        evaluator=EVALUATOR,
        health=health or (lambda step, values: []),
        show=("error",),
        tokens_per_step=ROWS * 4,
        flops_per_step=1e6,
        peak_flops_per_device=1e12,
    )


def mlp_task() -> Task:
    """Returns a task with kernels large enough to shard, in a stack of two layers."""

    def forward(params, x):
        hidden = x
        for layer in range(2):
            kernel = params["stages"]["0"]["feed_forward"]["intermediate"]["kernel"][layer]
            hidden = jax.nn.gelu(
                hidden @ kernel
                + params["stages"]["0"]["feed_forward"]["intermediate"]["bias"][layer]
            )
        return hidden @ params["head"]["kernel"]

    def init(key):
        keys = jax.random.split(key)
        wide = 0.1 * jax.random.normal(keys[0], (2, FEATURES, FEATURES))
        head = 0.1 * jax.random.normal(keys[1], (FEATURES, FEATURES))
        up = {"kernel": wide, "bias": jnp.zeros((2, FEATURES))}
        return {"stages": {"0": {"feed_forward": {"intermediate": up}}}, "head": {"kernel": head}}

    def loss(params, batch, key):
        del key
        error = ((forward(params, batch["x"]) - jnp.sin(batch["x"])) ** 2).mean(1)
        return error.mean(), _sums(error, batch["weight"])

    return dataclasses.replace(
        linear_task(), init=init, loss=loss, evaluate=lambda p, b, k: loss(p, b, k)[1]
    )


def make_config(steps: int = 12, **changes) -> Config:
    """Returns the config of the tiny run; `changes` have the form `section=dict(field=value)`."""
    config = Config()
    defaults = {
        "train": {"steps": steps, "batch_size": ROWS, "log_every": 2, "eval_every": 4},
        "checkpoint": {"every": 4},
        "optimizer": {"learning_rate": 0.05, "warmup_steps": 2},
    }
    sections = {
        name: dataclasses.replace(
            getattr(config, name), **defaults.get(name, {}) | changes.get(name, {})
        )
        for name in defaults.keys() | changes.keys()
    }
    return dataclasses.replace(config, **sections)


def run(folder: pathlib.Path, config: Config | None = None, **overrides) -> loop.Result:
    """Trains the noisy linear model in `folder` on all devices."""
    config = config or make_config()
    folder.mkdir(parents=True, exist_ok=True)
    batches = overrides.pop("batches", None) or Rows()

    def open_batches():
        batches.set_state({"position": 0})
        return batches

    segment = loop.Segment(
        end=config.train.steps,
        task=overrides.pop("task", None) or linear_task(),
        batches=open_batches,
        evaluation=overrides.pop("evaluation", evaluation),
    )
    arguments = {
        "segments": [segment],
        "config": config,
        "workdir": Workdir(folder),
        "mesh": partitioning.make_mesh(config.mesh),
    }
    return loop.train(**arguments | overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.0, help="to draw one batch")
    parser.add_argument("--save-every", type=int, default=5, help="steps")
    parser.add_argument("--log-every", type=int, default=1, help="steps")
    parser.add_argument("--hold", type=int, help="batches to draw, then wait to be killed")
    parser.add_argument("--poison", type=int, help="a batch that is not finite")
    parser.add_argument("--features", type=int, default=4, help="parameters of the model")
    parser.add_argument("--file-bytes", type=int, default=0, help="limit on every file, 0 is none")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0, help="number of this one")
    parser.add_argument("--port", type=int, default=0, help="of the coordinator")
    parser.add_argument("--cache", default="", help="folder of the compile cache")
    arguments = parser.parse_args()
    logging.use_absl_handler()
    console.set_up_logging()
    environment.enable_compile_cache(arguments.cache)
    watched = contextlib.nullcontext()
    if arguments.processes > 1:
        address = f"localhost:{arguments.port}"
        process = distributed.ProcessId(address, arguments.processes, arguments.process)
        watched = distributed.connect(
            process, timeout=60, silence=60, hint=lambda missing: "Start it."
        )
    if arguments.file_bytes:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.file_bytes, arguments.file_bytes))
    config = make_config(
        arguments.steps,
        train={"eval_every": 7, "log_every": arguments.log_every},
        checkpoint={"every": arguments.save_every},
    )
    rows = Rows(
        features=arguments.features,
        seconds=arguments.seconds,
        hold=arguments.hold,
        poison=arguments.poison,
    )
    try:
        with interrupts.handled(), watched:
            result = run(
                arguments.workdir,
                config,
                task=linear_task(features=arguments.features),
                batches=rows,
                evaluation=functools.partial(evaluation, features=arguments.features),
            )
    except UserError as error:
        console.fail(str(error))
    print(f"step {result.step} interrupted {result.interrupted}")
    if result.stopped_by:
        sys.exit(interrupts.exit_code(result.stopped_by))


if __name__ == "__main__":
    with interrupts.exiting_despite_threads():
        main()
