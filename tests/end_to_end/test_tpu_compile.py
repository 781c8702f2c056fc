"""The sharded pre-training step goes through the TPU compiler, on a machine without a TPU."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from convbert_jax import recipes
from convbert_jax.config import MeshSection
from convbert_jax.data.tokenizer import SpecialIds
from convbert_jax.training import optimizer, sharding, state, step
from tests.end_to_end.test_devices import small_config

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the libtpu wheel"),
]


def test_step_compiles_for_four_chips_of_v5e():
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    config = small_config()
    special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
    task = recipes.build_task(config, special, topology.devices[0])
    assert task.peak_flops_per_device == pytest.approx(197e12)
    mesh = sharding.make_mesh(MeshSection(data=2, fsdp=2), topology.devices)
    transformation = optimizer.make_optimizer(config.optimizer, config.train.steps)

    def init(key):
        return state.create(task.init(key), transformation)

    abstract = jax.eval_shape(init, jax.random.key(0))
    shardings = sharding.tree_shardings(abstract, mesh)
    train_step = step.make_train_step(
        task,
        transformation,
        optimizer.make_schedule(config.optimizer, config.train.steps),
        seed=0,
        accumulation=2,
        mesh=mesh,
        shardings=shardings,
    )
    place = sharding.batch_sharding(mesh)
    shape = (config.train.batch_size, config.data.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
        for name in ("tokens", "segment_ids", "type_ids")
    }
    with jax.set_mesh(mesh):
        compiled = train_step.lower(abstract, batch).compile()
    text = compiled.as_text()
    assert "bf16" in text  # compute dtype of an accelerator
    assert compiled.memory_analysis().temp_size_in_bytes < 16e9
