"""Train state: announced and actual structure, and functions that do not change their inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config import MeshSection, OptimizerSection
from convbert_jax.training import partitioning
from convbert_jax.training.optimizer import make_injected_lr_optimizer
from convbert_jax.training.train_step import Program, StepInputs, TrainStepConfig, make_program
from tests.running import needs_libtpu
from tests.training.tiny_run import FEATURES, make_config, make_rows, mlp_task

MESH = MeshSection(data=2, fsdp=2, tensor=2)


def told(runs: int | None, mesh=MESH) -> Program:
    """Task with a distinct seed per run, one rate, and a constant loss factor."""
    task = mlp_task()

    class Told:
        init, evaluate, rules = task.init, task.evaluate, task.rules

        @staticmethod
        def loss(params, batch, key, factor):
            value, sums = task.loss(params, batch, key)
            return factor * value + 0.0 * jax.random.uniform(key), sums

    def draw(step, seed, learning_rate, factor):
        return StepInputs(jax.random.fold_in(jax.random.key(seed), step), learning_rate, (factor,))

    learning = TrainStepConfig(
        make_injected_lr_optimizer(OptimizerSection(), 1.0), draw, (0, None, None)
    )
    return Program(Told, learning, partitioning.make_mesh(mesh), runs=runs)


def assert_is(abstract, state):
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    for shape, leaf in zip(jax.tree.leaves(abstract), jax.tree.leaves(state), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert shape.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.parametrize("runs", [None, 3])
def test_the_state_is_what_was_announced(runs):
    """`init`, `start` and a step agree in structure, shapes, dtypes and shardings."""
    program = told(runs)
    keys = jax.random.key(0) if runs is None else jax.random.split(jax.random.key(0), runs)
    with jax.set_mesh(program.mesh):
        state = program.init(keys)
        assert_is(program.abstract, state)
        params = jax.device_get(state.params)
        again = program.start(params)
        assert_is(program.abstract, again)
        rows = make_rows(0, FEATURES)
        if runs:
            rows = {name: np.stack([value] * runs) for name, value in rows.items()}
        seed = np.uint32(0) if runs is None else np.arange(runs, dtype=np.uint32)
        batch = partitioning.put_whole_batch(rows, program.rows)
        given = seed, np.float32(1e-2), np.float32(2.0)
        after, _, vitals = program.train_step(again, batch, *given)
        assert_is(program.abstract, after)
    assert int(after.step) == 1
    assert vitals.loss.shape == (() if runs is None else (runs,))
    kernel = after.params["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_runs_together_do_what_each_does_alone():
    """Eight devices; each run has its own seed for initialization and sampling."""
    seeds = [4, 7]
    together, alone = told(2), told(None)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    rows = [make_rows(seed, FEATURES) for seed in seeds]
    both = {name: np.stack([r[name] for r in rows]) for name in rows[0]}
    given = np.float32(1e-2), np.float32(2.0)
    with jax.set_mesh(together.mesh):
        batch = partitioning.put_whole_batch(both, together.rows)
        state, _, vitals = together.train_step(
            together.init(keys), batch, np.asarray(seeds, np.uint32), *given
        )
        for run, seed in enumerate(seeds):
            own = partitioning.put_whole_batch(rows[run], alone.rows)
            single, _, one = alone.train_step(alone.init(keys[run]), own, np.uint32(seed), *given)
            np.testing.assert_allclose(vitals.loss[run], one.loss, rtol=1e-5)
            for first, second in zip(
                jax.tree.leaves(state.params), jax.tree.leaves(single.params), strict=True
            ):
                np.testing.assert_allclose(first[run], second, atol=1e-5)


def test_an_evaluation_donates_nothing_and_a_step_its_state():
    task, config = mlp_task(), make_config()
    program = make_program(task, config, partitioning.make_mesh(MESH))
    with jax.set_mesh(program.mesh):
        state = program.init(jax.random.key(0))
        batch = program.put_batch(make_rows(0, FEATURES))
        outputs = program.eval_step(state.params, batch, jax.random.key(1))
        again = program.eval_step(state.params, batch, jax.random.key(1))
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(outputs))
        jax.tree.map(np.testing.assert_array_equal, outputs, again)
        program.train_step(state, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))


def test_given_parameters_are_left_as_they_are():
    """Many runs start from the same arrays, although steps donate their state."""
    program = told(None, MeshSection(data=1, fsdp=2, tensor=4))
    rows = make_rows(0, FEATURES)
    with jax.set_mesh(program.mesh):
        given = jax.device_get(program.init(jax.random.key(0)).params)
        kept = jax.tree.map(np.copy, given)
        batch = partitioning.put_whole_batch(rows, program.rows)
        program.train_step(
            program.start(given), batch, np.uint32(0), np.float32(1.0), np.float32(1.0)
        )
    jax.tree.map(np.testing.assert_array_equal, given, kept)


@pytest.mark.tpu_compile
@pytest.mark.slow
@needs_libtpu
def test_a_program_for_a_topology_runs_nothing():
    """Absent devices: shapes, shardings and compiled steps, but no arrays."""
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = partitioning.make_mesh(MeshSection(data=2, fsdp=2), topology.devices)
    program = make_program(mlp_task(), make_config(), mesh)
    batch = {
        name: jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=program.rows)
        for name, rows in make_rows(0, FEATURES).items()
    }
    key = jax.eval_shape(lambda: jax.random.key(0))
    with jax.set_mesh(mesh):
        assert program.init.lower(key).compile()
        step = program.train_step.lower(program.abstract, batch).compile()
        assert program.eval_step.lower(program.abstract.params, batch, key).compile()
    places = step.input_shardings[0][0].params
    assert places["head"]["kernel"].device_set == set(topology.devices)
    assert step.memory_analysis().temp_size_in_bytes < 16e9
