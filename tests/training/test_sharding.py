"""Meshes and partition rules; eight devices compute the same as one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from configs import base
from convbert_jax.config import Config, MeshSection, from_config_dict
from convbert_jax.interfaces import SpecialIds
from convbert_jax.models.networks import sharding_rules
from convbert_jax.recipes import build_task
from convbert_jax.training import partitioning, train_step
from convbert_jax.training.partitioning import ShardingError
from convbert_jax.training.train_step import make_program
from tests.refusals import refused
from tests.training.tiny_run import FEATURES, make_config, make_rows, mlp_task

RULES = (*sharding_rules(Config().encoder), *partitioning.RULES)  # rules of a ConvBERT


def start(mesh, task, accumulation: int = 1, **changes):
    """Returns program and state of a task on a mesh; `changes` apply to the optimizer section."""
    config = make_config(100, train={"accumulation": accumulation}, optimizer=changes)
    program = make_program(task, config, mesh)
    with jax.set_mesh(mesh):
        return program, program.init(jax.random.key(1))


def train_three(mesh, task, accumulation: int = 1, **changes):
    program, train_state = start(mesh, task, accumulation, **changes)
    reports = []
    with jax.set_mesh(mesh):
        for index in range(3):
            batch = program.put_batch(make_rows(index, FEATURES))
            train_state, metrics, vitals = program.train_step(train_state, batch)
            reports.append(jax.device_get((metrics, vitals)))
    return train_state, reports


def assert_close(first, second, bound=1e-5):
    """Asserts that every leaf agrees within `bound` of its largest value."""
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(first),
        jax.tree_util.tree_leaves_with_path(second),
        strict=True,
    ):
        a, b = np.float64(a), np.float64(b)
        error = np.abs(a - b).max() / max(np.abs(a).max(), 1e-30)
        assert error < bound, f"{jax.tree_util.keystr(path)} differs by {error}"


ONE = MeshSection(data=1)


@functools.cache
def on_one_device(accumulation: int):
    return train_three(partitioning.make_mesh(ONE, jax.devices()[:1]), mlp_task(), accumulation)


@pytest.mark.parametrize(
    ("mesh", "accumulation"),
    [(MeshSection(), 1), (MeshSection(fsdp=8), 1), (MeshSection(fsdp=2, tensor=2), 2)],
    ids=["data", "fsdp", "all axes, accumulated"],
)
def test_eight_devices_do_what_one_does(mesh, accumulation):
    """Compares parameters, both moments, metrics and gradient norm."""
    eight = train_three(partitioning.make_mesh(mesh), mlp_task(), accumulation)
    assert_close(on_one_device(accumulation), eight)


@pytest.mark.parametrize("method", ["adafactor", "muon"])
def test_other_optimizers_on_eight_devices_do_what_they_do_on_one(method):
    """Sums over a whole matrix are split over devices.

    Three steps with Muon's five matrix products amplify rounding: 1.2e-5 with jax 0.12.
    """
    one = train_three(partitioning.make_mesh(ONE, jax.devices()[:1]), mlp_task(), method=method)
    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    assert_close(one, train_three(mesh, mlp_task(), method=method), bound=3e-5)


def test_accumulation_is_the_whole_batch():
    assert_close(on_one_device(1), on_one_device(2))


def test_parts_of_a_batch_count_by_the_weight_of_their_loss():
    """Microbatches are weighted by their number of tokens, which may be zero."""
    task = mlp_task()

    def loss(params, batch, key):
        weight = batch["weight"] * (batch["x"][:, 0] > 0)
        total, count = task.loss(params, batch | {"weight": weight}, key)[1]["error"]
        return total / jnp.maximum(count, 1e-6), {"loss": (total, count)}

    uneven = dataclasses.replace(task, loss=loss)
    one = partitioning.make_mesh(ONE, jax.devices()[:1])
    assert_close(train_three(one, uneven), train_three(one, uneven, 4))


def weighted_task():
    """Task whose loss is divided by the rows' weights, which differ by microbatch."""
    task = mlp_task()

    def loss(params, batch, key):
        weight = 0.1 + jnp.square(batch["x"][:, 0])
        _, sums = task.loss(params, batch | {"weight": weight}, key)
        total, count = sums["error"]
        return 3 * total / count, sums

    return dataclasses.replace(task, loss=loss)


def test_replicas_normalize_and_clip_alone_as_in_the_release():
    """Adam gets the sum of eight separately normalized and clipped gradients."""
    task, clip = weighted_task(), 6.0
    fields = {"release_replicas": 8, "clip_norm": clip, "bias_correction": False}
    mesh = partitioning.make_mesh(ONE, jax.devices()[:1])
    program, first = start(mesh, task, **fields)
    params, rows = jax.device_get(first.params), make_rows(0, FEATURES)
    losses, norms, total = [], [], jax.tree.map(np.zeros_like, params)
    for replica in range(8):
        part = {name: value[replica::8] for name, value in rows.items()}
        (loss, _), gradients = jax.value_and_grad(task.loss, has_aux=True)(params, part, None)
        norm = float(np.sqrt(sum(np.square(g).sum() for g in jax.tree.leaves(gradients))))
        scale = clip * min(1 / norm, 1 / clip)  # tf.clip_by_global_norm
        total = jax.tree.map(lambda t, g, scale=scale: t + scale * g, total, gradients)
        losses.append(float(loss))
        norms.append(norm)
    assert min(norms) < clip < max(norms)
    with jax.set_mesh(mesh):
        after, _, vitals = program.train_step(first, program.put_batch(rows))
    moments = jax.device_get(after.opt_state[1].mu)
    jax.tree.map(lambda m, t: np.testing.assert_allclose(m, 0.1 * t, atol=1e-6), moments, total)
    assert vitals.loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert vitals.grad_norm == pytest.approx(np.mean(norms), rel=1e-5)


def test_replicas_are_the_same_on_eight_devices_and_in_microbatches():
    fields = {"release_replicas": 2, "clip_norm": 0.1}
    one = train_three(partitioning.make_mesh(ONE, jax.devices()[:1]), mlp_task(), **fields)
    assert_close(one, train_three(partitioning.make_mesh(MeshSection()), mlp_task(), **fields))
    cut = train_three(partitioning.make_mesh(ONE, jax.devices()[:1]), mlp_task(), 4, **fields)
    assert_close(one, cut)


def test_microbatches_draw_different_randomness():
    """The loss is a random number, which must differ between microbatches."""
    task = dataclasses.replace(
        mlp_task(),
        loss=lambda params, batch, key: (
            jax.random.uniform(key) + 0.0 * params["head"]["kernel"].sum(),
            {"draws": (jax.nn.one_hot(jnp.int32(1e6 * jax.random.uniform(key)) % 997, 997), 1.0)},
        ),
    )
    _, reports = train_three(partitioning.make_mesh(ONE, jax.devices()[:1]), task, accumulation=8)
    drawn = sum(metrics["draws"][0] for metrics, _ in reports)
    assert (drawn > 0).sum() > 16


def test_parameters_and_moments_are_split_not_copied():
    mesh = partitioning.make_mesh(MeshSection(data=2, fsdp=4))
    _, train_state = start(mesh, mlp_task())
    for tree in (train_state.params, train_state.opt_state[1].mu, train_state.opt_state[1].nu):
        kernel = tree["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
        assert kernel.addressable_shards[0].data.size == kernel.size // 4
        assert kernel.sharding.spec[0] is None, "the axis of layers must stay whole"
    assert train_state.step.sharding.is_fully_replicated


def test_rules():
    mesh = partitioning.make_mesh(MeshSection(data=1, fsdp=4, tensor=2))
    columns, rows = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
    for path, shape, spec in (
        ("embeddings/word/embedding", (30_522, 768), P()),
        ("embeddings/word/embedding", (32_000, 768), P("fsdp", None)),
        ("embeddings/norm/scale", (2**20,), P()),
        ("discriminator/stages/0/mixer/query/kernel", (12, 768, 384), columns),
        ("discriminator/stages/0/mixer/output/kernel", (12, 768, 768), rows),
        ("discriminator/stages/0/feed_forward/intermediate/kernel", (12, 768, 3072), columns),
        ("discriminator/stages/0/feed_forward/output/kernel", (12, 3072, 768), rows),
        ("discriminator/stages/0/mixer/key/kernel", (12, 64, 64), P()),
        ("discriminator/stages/0/mixer/key_conv/pointwise", (12, 768, 384), columns),
        ("stages/0/feed_forward/output/kernel", (9, 2, 768, 192), P(None, *rows)),
        ("discriminator_head/dense/kernel", (768, 768), P("fsdp", None)),
        ("generator_head/output_bias", (30_522,), P()),
    ):
        assert partitioning.partition_spec(path, shape, mesh, RULES) == spec, path


COLUMNS, ROWS = P(None, "fsdp", "tensor"), P(None, "tensor", "fsdp")
LAYER = {
    "feed_forward/intermediate/kernel": COLUMNS,
    "feed_forward/output/kernel": ROWS,
    "mixer/conv_kernel/kernel": COLUMNS,
    "mixer/conv_value/kernel": COLUMNS,
    "mixer/key/kernel": COLUMNS,
    "mixer/key_conv/pointwise": COLUMNS,
    "mixer/output/kernel": ROWS,
    "mixer/query/kernel": COLUMNS,
    "mixer/value/kernel": COLUMNS,
}
# Parameters of base that fsdp=2, tensor=2 shard; all others are replicated. The generator's
# filters, 128 x 18, are too small to shard.
BASE = {
    **{f"discriminator/stages/0/{name}": spec for name, spec in LAYER.items()},
    "discriminator_head/dense/kernel": P("fsdp", None),
    "embeddings/position/embedding": P("fsdp", None),
    "embeddings/word/embedding": P("fsdp", None),
    "generator/embeddings_project/kernel": P("fsdp", None),
    **{f"generator/stages/0/{name}": spec for name, spec in LAYER.items()},
    "generator/stages/0/mixer/conv_kernel/kernel": P(),
    "generator_head/dense/kernel": P(None, "fsdp"),
}


def test_where_every_parameter_of_base_lies():
    """Includes the optimizer moments; a change here alters memory and communication per step."""
    config = from_config_dict(base.get_config())
    task = build_task(config, SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4), jax.devices()[0])
    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    placed = make_program(task, config, mesh).shardings
    for tree in (placed.params, placed.opt_state[1].mu, placed.opt_state[1].nu):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        specs = {partitioning.parameter_path(path): leaf.spec for path, leaf in leaves}
        assert BASE.keys() < specs.keys()
        assert specs == dict.fromkeys(specs, P()) | BASE


def test_parameters_that_cannot_be_divided_are_errors():
    with refused(ShardingError, value="encoder/gate"):
        mesh = partitioning.make_mesh(MeshSection())
        partitioning.partition_spec("encoder/gate", (3,), mesh, partitioning.RULES)
    with refused(ShardingError, "head/kernel", field="config.mesh.fsdp", value=8):
        mesh = partitioning.make_mesh(MeshSection(fsdp=8))
        partitioning.partition_spec("head/kernel", (999, 999), mesh, RULES)
    path = "stages/0/mixer/query/kernel"
    with refused(ShardingError, path, field="config.mesh.tensor", value=8):
        mesh = partitioning.make_mesh(MeshSection(tensor=8))
        partitioning.partition_spec(path, (2, 768, 100), mesh, RULES)


def test_meshes_that_do_not_fit_are_errors():
    for section, mentions in (
        (MeshSection(fsdp=3), ("config.mesh.fsdp=3", 8)),
        (MeshSection(data=2, fsdp=2), ("config.mesh.data=2", 4, 8)),
        (MeshSection(data=16), ("config.mesh.data=16", 8)),
    ):
        with refused(ShardingError, *mentions):
            partitioning.make_mesh(section)


def test_mesh_takes_what_is_left():
    mesh = partitioning.make_mesh(MeshSection(data=2, fsdp=-1, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "tensor": 2, "sequence": 1}


@dataclasses.dataclass(frozen=True)
class OfSlice:
    """Simulated device for mesh_utils: two slices of four, out of order."""

    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"

    @property
    def slice_index(self):
        return self.id % 2

    process_index = slice_index


def test_slices_lie_along_data():
    """Communication over fsdp, tensor and sequence stays within a slice."""
    devices = [OfSlice(i) for i in range(8)]
    assert partitioning.count_slices(devices) == 2
    with pytest.MonkeyPatch.context() as patch:
        made = {}
        patch.setattr(partitioning, "Mesh", lambda placed, axes, **_: made.update(placed=placed))
        partitioning.make_mesh(MeshSection(fsdp=2), devices)
        placed = made["placed"]
        assert placed.shape == (4, 2, 1, 1)
        of_slices = np.vectorize(lambda device: device.slice_index)(placed)[..., 0, 0]
        np.testing.assert_array_equal(of_slices, [[0, 0], [0, 0], [1, 1], [1, 1]])
        with refused(ShardingError, 2, field="config.mesh.data", value=1):
            partitioning.make_mesh(MeshSection(fsdp=8), devices)


def test_batches_that_do_not_split_name_the_nearest():
    mesh = partitioning.make_mesh(MeshSection(fsdp=2))
    partitioning.check_batch_size(48, 2, mesh)
    size = "config.train.batch_size"
    with refused(ShardingError, "accumulation=2", 32, 48, field=size, value=40):
        partitioning.check_batch_size(40, 2, mesh)
    with refused(ShardingError, 8, field=size, value=3) as alone:
        partitioning.check_batch_size(3, 1, mesh)
    assert "accumulation" not in str(alone.value)
    with refused(ShardingError, "release_replicas=8", 128, 256, field=size, value=130):
        partitioning.check_batch_size(130, 2, mesh, replicas=8)


def test_rows_that_do_not_split_are_refused():
    mesh = partitioning.make_mesh(MeshSection(sequence=4))
    partitioning.check_length(128, mesh)
    with refused(ShardingError, "sequence=4", field="config.data.length", value=130):
        partitioning.check_length(130, mesh)


def test_processes_that_would_share_rows_are_refused(monkeypatch):
    """Each process reads separate rows, so it must own all positions of a row."""
    mesh = partitioning.make_mesh(MeshSection(data=2, sequence=4))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    partitioning.check_batch_size(16, 1, mesh)
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with refused(ShardingError, "4 processes", field="config.mesh.data", value=2):
        partitioning.check_batch_size(16, 1, mesh)


def test_given_weights_are_divided_over_the_devices():
    mesh = partitioning.make_mesh(MeshSection(data=1, fsdp=4, tensor=2))
    tree = {"stages": {"0": {"feed_forward": {"intermediate": {
        "kernel": np.arange(2 * 128 * 256, dtype=np.float32).reshape(2, 128, 256),
        "bias": np.ones((2, 256), np.float32),
    }}}}}  # fmt: skip
    put = partitioning.put_params(tree, partitioning.tree_shardings(tree, mesh, partitioning.RULES))
    kernel = put["stages"]["0"]["feed_forward"]["intermediate"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 32, 128)}
    jax.tree.map(np.testing.assert_array_equal, tree, jax.device_get(put))


def test_keys_differ_by_step_and_name():
    keys = {
        tuple(jax.random.key_data(train_step.step_key(seed, at, name)).tolist())
        for seed in (0, 1)
        for at in (0, 1)
        for name in ("loss", "evaluation")
    }
    assert len(keys) == 8
