"""Memory of one device by cause, estimated from shapes, and the error when it is exhausted."""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from convbert_jax.config import MeshSection, UserError
from convbert_jax.training import partitioning
from convbert_jax.training.partitioning import Params
from convbert_jax.training.train_step import Program, Task

_GIB = 2**30
_MIB = 2**20


LESS_TO_TRAIN = (
    "raise config.train.accumulation (same batch, smaller microbatches), set "
    "config.model.remat=dots or full, shard parameters with config.mesh.fsdp, or lower "
    "config.train.batch_size (for text pairs, config.parallel.batch_tokens)"
)


class OutOfMemoryError(UserError):
    """The device has too little memory."""


@contextlib.contextmanager
def explain_out_of_memory(
    work: str, advice: str, find_causes: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Replaces an out-of-memory error of JAX within the block by one that names causes and fixes.

    Args:
      work: the activity, for example "evaluating".
      advice: settings that reduce memory, as an imperative clause without a period.
      find_causes: called after the error; returns cause -> bytes per device where known.

    Raises:
      OutOfMemoryError: the device has too little memory.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # jaxlib sometimes raises ValueError with the same message.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.local_devices()[0]
        first = str(error).strip().splitlines()[0][:200].rstrip(".")
        causes = find_causes()
        limit = (device.memory_stats() or {}).get("bytes_limit")
        raise OutOfMemoryError(
            f"Out of memory on {device.device_kind} while {work}: {first}. "
            + (f"Needed per device: {spell_causes(causes)}. " if causes else "")
            + (f"Available: {spell_bytes(limit)}. " if limit else "")
            + f"To fix this, {advice}."
        ) from error


def put_on_device(params: Params) -> Params:
    """Copies the unsharded parameters of a model for inference to the default device.

    Raises:
      OutOfMemoryError: the device has too little memory.
    """

    def find() -> dict[str, int]:
        return {"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}

    advice = "use a device with more memory, or the CPU with JAX_PLATFORMS=cpu"
    with explain_out_of_memory("loading a model", advice, find):
        return jax.block_until_ready(jax.device_put(params))


def bytes_of_device(tree) -> int:
    """Returns the bytes per device of arrays or `jax.ShapeDtypeStruct`s with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def kept_bytes(
    task: Task, params: Params, batch, accumulation: int, mesh: Mesh | AbstractMesh, one: Mesh
) -> int:
    """Estimates the bytes per device of a microbatch's activations kept for the backward pass.

    Computed as the difference between the residuals of 2n and of n rows.

    Args:
      batch: name -> shape of the global batch.
      accumulation: microbatches per batch.
      one: mesh of one device of the same kind as those of `mesh`, to trace on.
    """
    rows = max(1, next(iter(batch.values())).shape[0] // count_shards(mesh) // accumulation)
    step = jax.ShapeDtypeStruct((), jnp.int32)

    # Without shardings, which belong to another mesh.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def backward(params, batch, step, *given):
        def loss(params):
            return task.loss(params, batch, jax.random.key(0), *task.phase(step), *given)

        return jax.vjp(loss, params, has_aux=True)[1]

    def count(rows: int) -> int:
        cut = {n: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for n, x in batch.items()}
        given = () if task.frozen is None else (task.frozen,)
        with jax.set_mesh(one):
            kept = jax.eval_shape(backward, shapes, cut, step, *given)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(kept))

    return (count(2 * rows) - count(rows)) // (mesh.shape["tensor"] * mesh.shape["sequence"])


def find_causes(
    task: Task,
    program: Program,
    batch: Mapping[str, jax.ShapeDtypeStruct] | None,
    accumulation: int,
) -> dict[str, int]:
    """Returns cause -> bytes per device of a training step.

    Args:
      batch: name -> shape of the global batch; None, before the first batch: no activations.
      accumulation: microbatches per batch.
    """
    state, mesh = program.abstract, program.mesh
    causes = find_state(state.params, state.opt_state) | {
        "gradients": bytes_of_device(state.params)
    }
    if task.frozen is not None:
        placed = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            task.frozen,
            program.extra_shardings[0],
        )
        causes["teacher parameters"] = bytes_of_device(placed)
    if batch is not None:
        one = partitioning.make_mesh(MeshSection(), list(mesh.devices.flat[:1]))
        kept = kept_bytes(task, state.params, batch, accumulation, mesh, one)
        causes["activations kept for the backward pass"] = kept
    return causes


def find_state(params: Params, opt_state: Any = None) -> dict[str, int]:
    """Returns cause -> bytes per device of arrays or `jax.ShapeDtypeStruct`s with shardings."""
    causes = {"parameters": bytes_of_device(params)}
    if opt_state is not None:
        causes["optimizer state"] = bytes_of_device(opt_state)
    return causes


def count_shards(mesh: Mesh | AbstractMesh) -> int:
    """Returns the number of shards of the batch axis (data x fsdp)."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def spell_causes(causes: Mapping[str, int]) -> str:
    """Formats causes, largest first, as "activations 12.1 GiB, parameters 0.4 GiB"."""
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    return ", ".join(f"{name} {spell_bytes(size)}" for name, size in ordered)


def spell_bytes(size: float) -> str:
    """Formats bytes as "12.1 GiB", or as "4.0 MiB" below 0.1 GiB."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / _MIB:.1f} MiB"
