"""A run that starts from given weights, and one that publishes its weights as it goes."""

import jax
import numpy as np
import pytest

from convbert_jax.config import MeshSection
from convbert_jax.training import sharding
from tests.training.tiny_run import make_config, run


def train(folder, steps, **hooks):
    config = make_config(steps, checkpoint={"every": 4, "keep": 9, "huggingface_every": 3})
    return run(folder, config, **hooks)


def given(kernel=7.0):
    return {"dense": {"kernel": np.full(4, kernel, np.float32), "bias": np.float32(0)}}


def test_given_weights_are_where_a_run_starts(tmp_path):
    seen = {}
    asked = []

    def initial_params():
        asked.append(1)
        return given()

    def publish(step, params):
        seen[step] = np.asarray(params["dense"]["kernel"])

    train(tmp_path, 4, initial_params=initial_params, publish=publish)
    np.testing.assert_array_equal(seen[0], np.full(4, 7.0))
    train(tmp_path, 8, initial_params=initial_params, publish=publish)
    assert len(asked) == 1  # a run that goes on has weights of its own


def test_published_at_step_0_and_every_few(tmp_path):
    steps = []
    train(tmp_path, 7, publish=lambda step, params: steps.append(step))
    assert steps == [0, 3, 6]
    train(tmp_path, 12, publish=lambda step, params: steps.append(step))
    assert steps == [0, 3, 6, 9, 12]


def test_nothing_is_lost_by_a_kill_while_publishing(tmp_path):
    """Step 3 fails on its way out: the next start comes by it again."""
    published = []

    def interrupted(step, params):
        if step == 3:
            raise KeyboardInterrupt
        published.append(step)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 6, publish=interrupted)
    assert published == [0]
    train(tmp_path, 6, publish=lambda step, params: published.append(step))
    assert published[-2:] == [3, 6]


def test_given_weights_are_divided_over_the_devices():
    mesh = sharding.make_mesh(MeshSection(data=1, fsdp=4, tensor=2))
    tree = {"stages": {"0": {"feed_forward": {"intermediate": {
        "kernel": np.arange(2 * 128 * 256, dtype=np.float32).reshape(2, 128, 256),
        "bias": np.ones((2, 256), np.float32),
    }}}}}  # fmt: skip
    put = sharding.put_params(tree, sharding.tree_shardings(tree, mesh, sharding.RULES))
    kernel = put["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 32, 128)}
    jax.tree.map(np.testing.assert_array_equal, tree, jax.device_get(put))
