"""What a training step takes of the memory of one device, by cause, from shapes alone."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from convbert_jax.config import MeshSection
from convbert_jax.training import sharding
from convbert_jax.training.program import Program
from convbert_jax.training.task import Params, Task

_GIB = 2**30
_MIB = 2**20


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
    parameters = bytes_of_device(state.params)
    causes = {
        "parameters": parameters,
        "gradients": parameters,
        "moments of the optimizer": bytes_of_device(state.opt_state),
    }
    if batch is not None:
        one = sharding.make_mesh(MeshSection(), list(mesh.devices.flat[:1]))
        kept = kept_bytes(task, state.params, batch, accumulation, mesh, one)
        causes["activations that wait for the backward pass"] = kept
    return causes


def count_shards(mesh: Mesh | AbstractMesh) -> int:
    """Parts that rows are cut into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def spell_causes(causes: Mapping[str, int]) -> str:
    """As "activations 12.1 GiB, parameters 0.4 GiB", the largest first."""
    ordered = sorted(causes.items(), key=lambda cause: -cause[1])
    return ", ".join(f"{name} {_spell(size)}" for name, size in ordered)


def _spell(size: int) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB / 10 else f"{size / _MIB:.1f} MiB"
