"""What a run takes of the memory of one device, by cause, from shapes alone; and the sentence where
that is too much.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from convbert_jax.config import MeshSection, UserError
from convbert_jax.training import sharding
from convbert_jax.training.program import Program
from convbert_jax.training.task import Params, Task

_GIB = 2**30
_MIB = 2**20


LESS_TO_TRAIN = (
    "raise config.train.accumulation (as many rows, fewer at once), set config.model.remat=dots or "
    "full, split parameters with config.mesh.fsdp, or lower config.train.batch_size, for pairs of "
    "texts config.parallel.batch_tokens"
)


class OutOfMemoryError(UserError):
    """The device has too little memory for what runs on it."""


@contextlib.contextmanager
def explain_out_of_memory(
    work: str, advice: str, find_causes: Callable[[], Mapping[str, int]] = dict
) -> Iterator[None]:
    """Turns the device's out-of-memory error, which says how many bytes were asked for, into one
    sentence.

    Args:
      work: what is being done, as "evaluating".
      advice: the settings that lower what it takes.
      find_causes: asked then: cause -> bytes of a device, as far as they are known.

    Raises:
      OutOfMemoryError: the device is too small.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        # jaxlib's own error comes as the other one at times, with the same words.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        device = jax.local_devices()[0]
        first = str(error).strip().splitlines()[0][:200].rstrip(".")
        causes = find_causes()
        limit = (device.memory_stats() or {}).get("bytes_limit")
        raise OutOfMemoryError(
            f"out of memory on {device.device_kind} while {work} ({first}); "
            + (f"it takes of a device {spell_causes(causes)}; " if causes else "")
            + (f"there are {spell_bytes(limit)}; " if limit else "")
            + f"{advice}."
        ) from error


def put_on_device(params: Params) -> Params:
    """The parameters of a model in use, whole, on the first device.

    Raises:
      OutOfMemoryError: it is too small for them.
    """

    def find() -> dict[str, int]:
        return {"parameters": sum(leaf.nbytes for leaf in jax.tree.leaves(params))}

    advice = "take a device with more memory, or the CPU with JAX_PLATFORMS=cpu"
    with explain_out_of_memory("loading a model", advice, find):
        return jax.block_until_ready(jax.device_put(params))


def bytes_of_device(tree) -> int:
    """Of what lies on one device of arrays, or of shapes, that know their places."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def kept_bytes(
    task: Task, params: Params, batch, accumulation: int, mesh: Mesh | AbstractMesh, one: Mesh
) -> int:
    """Activations of one device that wait for the backward pass, of one microbatch: what a step of
    twice as many rows keeps more.

    Args:
      batch: name -> shape, of all devices.
      accumulation: microbatches of a batch.
      one: a device to trace on, of the kind of those of `mesh`.
    """
    rows = max(1, next(iter(batch.values())).shape[0] // count_shards(mesh) // accumulation)
    step = jax.ShapeDtypeStruct((), jnp.int32)

    # Without their places, which are of another mesh.
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
    """Cause -> bytes of one device that a step takes.

    Args:
      batch: name -> shape, of all devices; None where none was drawn yet: without activations.
      accumulation: microbatches of a batch.
    """
    state, mesh = program.abstract, program.mesh
    causes = find_state(state.params, state.opt_state) | {
        "gradients": bytes_of_device(state.params)
    }
    if task.frozen is not None:
        placed = jax.tree.map(
            lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
            task.frozen,
            program.given_places[0],
        )
        causes["parameters of the teacher"] = bytes_of_device(placed)
    if batch is not None:
        one = sharding.make_mesh(MeshSection(), list(mesh.devices.flat[:1]))
        kept = kept_bytes(task, state.params, batch, accumulation, mesh, one)
        causes["activations that wait for the backward pass"] = kept
    return causes


def find_state(params: Params, opt_state: Any = None) -> dict[str, int]:
    """Cause -> bytes of one device that arrays, or shapes that know their places, take."""
    causes = {"parameters": bytes_of_device(params)}
    if opt_state is not None:
        causes["moments of the optimizer"] = bytes_of_device(opt_state)
    return causes


def count_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts that rows are cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def spell_causes(causes: Mapping[str, int]) -> str:
    """As "activations 12.1 GiB, parameters 0.4 GiB", the largest first."""
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    return ", ".join(f"{name} {spell_bytes(size)}" for name, size in ordered)


def spell_bytes(size: float) -> str:
    """As "12.1 GiB", or "4.0 MiB" where that is less than a tenth of one."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / _MIB:.1f} MiB"
