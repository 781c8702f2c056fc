"""Choice of implementation, implementation names in configs, and sharding over a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config.model import ATTENTIONS, CONVOLUTIONS
from convbert_jax.ops import attention, convolution, dispatch, partitioning
from convbert_jax.ops.dispatch import Implementation
from convbert_jax.ops.partitioning import BATCH, HEADS, REPLICATED, ROWS, SEQUENCE
from convbert_jax.training import partitioning as partitioning_lib
from tests.ops.definitions import make_mesh
from tests.refusals import refused


@pytest.mark.parametrize(
    ("table", "names"),
    [
        (attention.IMPLEMENTATIONS, ATTENTIONS),
        *((table, CONVOLUTIONS) for table in convolution.IMPLEMENTATIONS.values()),
    ],
)
def test_a_config_has_the_names_of_the_tables(table, names):
    """model.attention and model.convolution have the same meaning in each op."""
    assert {name: one.platform for name, one in table.items()} == names


def double(x):
    return 2 * x


SMALL, UNTRIED = "it is for small ones", "nobody has tried it"
TABLE = {
    "fast": Implementation(double, "tpu"),
    "picky": Implementation(double, refuses=lambda x: "" if x.size < 4 else SMALL),
    "shy": Implementation(double, left_by_auto=lambda x: UNTRIED),
    "plain": Implementation(abs),
}


@pytest.fixture(autouse=True)
def _say_again():
    dispatch.say.cache_clear()


def test_auto_takes_the_first_that_can_and_says_once_why_not_the_others(caplog):
    with caplog.at_level("INFO"):
        chosen = [dispatch.choose("twice", "auto", TABLE, jnp.ones(9)) for _ in range(2)]
    assert chosen == [abs, abs]
    (record,) = caplog.records
    for mention in ("twice", "plain", "cpu", "fast", "tpu", "picky", SMALL, "shy", UNTRIED):
        assert mention in record.getMessage()
    assert dispatch.choose("twice", "auto", TABLE, jnp.ones(3)) is double


@pytest.mark.parametrize(
    ("name", "mentions"),
    [("slow", ["auto", *TABLE]), ("fast", ["cpu", "tpu"]), ("picky", ["cpu", SMALL])],
)
def test_a_named_one_never_gives_way(name, mentions):
    with refused(ValueError, "twice", name, *mentions):
        dispatch.choose("twice", name, TABLE, jnp.ones(9))


def test_a_named_one_is_taken_where_auto_would_not():
    assert dispatch.choose("twice", "shy", TABLE, jnp.ones(9)) is double


def test_auto_without_one_that_can_is_an_error():
    with refused(ValueError, "twice", "cpu", "fast", "tpu"):
        dispatch.choose("twice", "auto", {"fast": TABLE["fast"]}, jnp.ones(9))


@pytest.mark.parametrize("platform", ["tpu", "cpu"], ids="for_{}".format)
def test_tpu_kernels_are_not_for_float16(platform, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    x, filters = jnp.ones((1, 8, 4), jnp.float16), jnp.ones((3, 4), jnp.float16)
    out = convolution.depthwise_conv(x, filters)
    assert out.dtype == jnp.float16
    with refused(ValueError, "pallas_tpu", "float16" if platform == "tpu" else "tpu"):
        convolution.depthwise_conv(x, filters, implementation="pallas_tpu")


# --- On a mesh ---


def mesh(**sizes):
    return jax.set_mesh(make_mesh(**sizes))


@pytest.mark.parametrize(
    ("sizes", "rows", "spec", "shape"),
    [
        ({"data": 4, "tensor": 2}, 8, partitioning.ROWS_AND_HEADS, (2, 3, 2, 2)),
        ({"data": 4, "tensor": 2}, 8, ROWS, (2, 3, 4, 2)),
        ({"data": 4, "tensor": 2}, 8, REPLICATED, (8, 3, 4, 2)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, partitioning.ROWS_AND_HEADS, (2, 3, 2, 2)),
        ({"tensor": 8}, 8, partitioning.ROWS_AND_HEADS, (8, 3, 4, 2)),  # 4 heads do not split in 8
        ({"data": 4, "fsdp": 2}, 6, ROWS, (3, 3, 4, 2)),  # split over fsdp only
        ({"data": 8}, 6, ROWS, (6, 3, 4, 2)),
        ({"data": 1}, 8, ROWS, (8, 3, 4, 2)),
    ],
)
def test_each_device_gets_its_part(sizes, rows, spec, shape):
    """Check the shape that a kernel sees on a device, and the combined result."""
    x, seen = np.arange(rows * 3 * 4 * 2.0).reshape(rows, 3, 4, 2), []

    def kernel(x):
        seen.append(x.shape)
        return 2 * x

    with mesh(**sizes):
        result = jax.jit(lambda x: partitioning.shard_map_op(kernel, [x], [spec], spec))(x)
    np.testing.assert_array_equal(result, 2 * x)
    assert seen == [shape]


def test_rows_are_widened_only_where_they_have_neighbors():
    """Regression: rows were padded although the axis `sequence` had one device."""
    halo = partitioning.Halo(offsets=(-1, 0, 1), read=(0,))
    lengths = []

    def kernel(x):
        lengths.append(x.shape[1])
        return x

    def run(x):
        rows = partitioning.POSITIONS
        return partitioning.shard_map_op(kernel, [x], [rows], rows, halo=halo)

    x = jnp.arange(64.0).reshape(4, 16, 1)
    for divided in (1, 2):
        with mesh(data=2, sequence=divided):
            np.testing.assert_array_equal(jax.jit(run)(x), x)
    assert lengths == [16, 8 + 2]


@pytest.mark.parametrize("size", [1, 2])
def test_an_axis_that_kernels_do_not_know_is_an_error(size):
    with mesh(data=4, expert=size), refused(ValueError, "expert", *BATCH, HEADS, SEQUENCE):
        partitioning.shard_map_op(abs, [np.ones(8)], [ROWS], ROWS)


def test_the_axes_are_those_of_training():
    assert BATCH == partitioning_lib.BATCH_AXES
    assert (*BATCH, HEADS, SEQUENCE) == partitioning_lib.AXES


def test_whole_channels_between_products_on_a_mesh():
    """Otherwise XLA:CPU swaps rows between devices if two axes shard w and wo."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (8, 4, 16))
    shapes = (16, 16), (16, 32), (32, 16)
    weights = [0.3 * jax.random.normal(k, shape) for k, shape in zip(keys[1:], shapes, strict=True)]

    def run(x, w, wi, wo):
        x = partitioning.constrain_activations(x)
        x = partitioning.constrain_activations(x + x @ w)
        return x + jnp.tanh(x @ wi) @ wo

    wanted = run(x, *weights)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    specs = ROWS, jax.P("fsdp", "tensor"), jax.P("fsdp", "tensor"), jax.P("tensor", "fsdp")
    with jax.set_mesh(mesh):
        places = [jax.NamedSharding(mesh, spec) for spec in specs]
        given = [jax.device_put(a, p) for a, p in zip((x, *weights), places, strict=True)]
        out = jax.jit(run)(*given)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("rows", [8, 3])
def test_whole_channels_says_nothing_where_nothing_splits_heads(rows):
    x = jnp.ones((rows, 2))
    for sizes, says in (({"data": 8, "tensor": 1}, False), ({"data": 4, "tensor": 2}, True)):
        with mesh(**sizes):
            jaxpr = str(jax.make_jaxpr(partitioning.constrain_activations)(x))
            np.testing.assert_array_equal(jax.jit(partitioning.constrain_activations)(x), x)
        assert ("sharding_constraint" in jaxpr) == says
    assert "sharding_constraint" not in str(jax.make_jaxpr(partitioning.constrain_activations)(x))


@pytest.mark.parametrize(("devices", "found"), [(1, 1), (2, 6)])
def test_several_cpus_take_all_layers_at_once_and_say_so(devices, found, caplog):
    with caplog.at_level("INFO"), mesh(data=devices):
        assert partitioning.layers_at_once(6, 1, training=True) == found
        assert partitioning.layers_at_once(6, 9, training=True) == 6
        assert partitioning.layers_at_once(6, 6, training=False) == found
    assert ["6" in record.getMessage() for record in caplog.records] == [True] * (devices > 1)
