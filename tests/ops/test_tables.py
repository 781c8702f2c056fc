"""Embedding lookup and logits with their gradients, on one device and on several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.ops import dispatch, partitioning
from convbert_jax.ops.embedding import attend, embedding_lookup
from tests.ops import definitions
from tests.pairwise import pairwise
from tests.running import needs_libtpu


def mesh(data, fsdp, tensor, devices=None):
    return definitions.make_mesh(devices, data=data, fsdp=fsdp, tensor=tensor)


@pytest.mark.parametrize(
    ("sizes", "rows", "inner", "ends"),
    pairwise([(1, 1, 1), (8, 1, 1), (2, 2, 2), (2, 4, 1)], [8, 16, 3], [(), (5,), (2, 3)], [7, 40]),
)
def test_it_is_a_gather_and_its_gradient_a_sum_over_ids(sizes, rows, inner, ends):
    """Three rows cannot be sharded, so every device sums all of them."""
    random = np.random.default_rng(0)
    table = jnp.asarray(random.normal(size=(32, 4)), jnp.float32)
    ids = random.integers(0, min(ends, 32), (rows, *inner))
    cotangent = random.normal(size=(*ids.shape, 4)).astype(np.float32)

    def both(table, ids, cotangent):
        out, pull = jax.vjp(lambda table: embedding_lookup(table, ids), table)
        return out, pull(cotangent)[0]

    with jax.set_mesh(mesh(*sizes)):
        out, gradient = jax.jit(both)(table, ids, cotangent)
    np.testing.assert_array_equal(out, np.asarray(table)[ids])
    wanted = np.zeros((32, 4))
    np.add.at(wanted, ids, cotangent.astype(np.float64))
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)


def test_its_gradient_is_sent_in_another_dtype_after_each_device_has_added_up_its_rows():
    """A device sums 257 ones, which bfloat16 rounds to 256."""
    ids = np.zeros((8, 257), np.int32)

    def gradient(table):
        def loss(table):
            return embedding_lookup(
                partitioning.copy_per_device(table, jnp.dtype("bfloat16")), ids
            ).sum()

        return jax.grad(loss)(table)

    with jax.set_mesh(mesh(2, 4, 1)):
        found = jax.jit(gradient)(jnp.ones((3, 2)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, [[8 * 256.0] * 2, [0.0] * 2, [0.0] * 2])
    with jax.set_mesh(mesh(1, 1, 8)):
        assert jax.jit(gradient)(jnp.ones((3, 2)))[0, 0] == 8 * 257.0


def test_an_id_that_is_no_row_gives_nan_and_no_gradient():
    table = jnp.ones((3, 2))
    ids = jnp.array([1, 3])
    out, pull = jax.vjp(lambda table: embedding_lookup(table, ids), table)
    np.testing.assert_array_equal(np.isnan(out), [[False] * 2, [True] * 2])
    np.testing.assert_array_equal(pull(jnp.ones((2, 2)))[0], [[0, 0], [1, 1], [0, 0]])


def test_the_gradient_has_the_dtype_of_the_table():
    gradient = jax.grad(lambda t: embedding_lookup(t, jnp.zeros(4096, jnp.int32)).sum())
    assert gradient(jnp.ones((2, 1), jnp.float32)).dtype == jnp.float32
    assert gradient(jnp.ones((2, 1), jnp.bfloat16)).dtype == jnp.bfloat16


def _bias_of_a_table(rows=16):
    keys = jax.random.split(jax.random.key(0), 4)
    h = jax.random.normal(keys[0], (rows, 3, 8)).astype(jnp.bfloat16)
    table, bias = jax.random.normal(keys[1], (300, 8)), jax.random.normal(keys[2], (300,))
    weights = jax.random.normal(keys[3], (rows, 3, 300)).astype(jnp.bfloat16).astype(jnp.float32)

    def loss(h, table, bias):
        return (attend(h, table, bias) * weights).sum()

    return loss, (h, table, bias), weights


def test_on_a_tpu_the_bias_of_a_table_has_its_gradient_from_the_table_s_product(monkeypatch):
    """The bias is not rounded when added, and its gradient does not read all logits again."""
    loss, arrays, weights = _bias_of_a_table()
    exact = [np.asarray(x, np.float64) for x in arrays]
    gradient = jax.grad(loss, (0, 1, 2))
    plain = gradient(*arrays)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    wanted = np.einsum("abe,ve->abv", exact[0], np.float64(arrays[1].astype(jnp.bfloat16)))
    np.testing.assert_allclose(attend(*arrays), wanted + exact[2], rtol=1e-5, atol=1e-5)
    found = gradient(*arrays)
    for one, other in zip(found, plain, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=1e-3
        )
    np.testing.assert_allclose(found[2], np.float64(weights).sum((0, 1)), rtol=1e-5, atol=1e-5)
    sums_of_logits = [
        line for line in str(jax.make_jaxpr(gradient)(*arrays)).splitlines()
        if "reduce_sum" in line and "300" in line
    ]  # fmt: skip
    assert not sums_of_logits

    few, arrays, _ = _bias_of_a_table(rows=13)
    assert "concatenate" not in str(jax.make_jaxpr(jax.grad(few))(*arrays))


@pytest.mark.parametrize(("copied", "platform"), [(True, "cpu"), (True, "tpu"), (False, "tpu")])
def test_the_bias_of_a_table_is_summed_over_devices(copied, platform, monkeypatch):
    loss, arrays, weights = _bias_of_a_table(rows=112)  # 42 vectors of width 8 on each of 8 devices
    wanted = jax.grad(loss, (0, 1, 2))(*arrays)
    monkeypatch.setattr(dispatch, "platform", lambda: platform)

    def gradients(h, table, bias):
        def of_copies(h, table, bias):
            return loss(
                h, partitioning.copy_per_device(table, jnp.float32) if copied else table, bias
            )

        return jax.grad(of_copies, (0, 1, 2))(h, table, bias)

    with jax.set_mesh(mesh(4, 2, 1)):
        found = jax.jit(gradients)(*arrays)
        beside = "concatenate" in str(jax.make_jaxpr(gradients)(*arrays))
    assert beside == (platform == "tpu")
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(
            one.astype(jnp.float32), other.astype(jnp.float32), rtol=1e-2, atol=1e-3
        )
    np.testing.assert_allclose(found[2], np.float64(weights).sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_table_that_is_read_three_times_is_sent_once():
    """Autodiff of the lookup would send the table twice."""
    from convbert_jax.analysis import hlo
    from convbert_jax.analysis.tpu_devices import open_topology

    devices = open_topology("v5e:2x2").devices
    chips = mesh(4, 1, 1, devices)

    def megabytes(embedding_lookup):
        def loss(table, ids, others):
            hidden = jnp.tanh(embedding_lookup(table, ids))
            logits = jnp.einsum("ble,ve->blv", hidden, table)
            return (
                jax.nn.logsumexp(logits, axis=-1).sum() + embedding_lookup(table, others)[..., 0]
            ).sum()

        rows = jax.NamedSharding(chips, jax.P(("data", "fsdp")))
        whole = jax.NamedSharding(chips, jax.P())
        ids = jax.ShapeDtypeStruct((64, 128), jnp.int32, sharding=rows)
        table = jax.ShapeDtypeStruct((4_000, 128), jnp.float32, sharding=whole)
        with jax.set_mesh(chips):
            compiled = jax.jit(jax.grad(loss)).lower(table, ids, ids).compile()
        found = hlo.find_collectives(compiled.as_text(), dict(chips.shape))
        return sum(each.array_bytes for each in found) / 1e6

    table = 4_000 * 128 * 4 / 1e6
    assert table <= megabytes(embedding_lookup) < 1.01 * table
    assert megabytes(lambda table, ids: jnp.take(table, ids, axis=0)) >= 2 * table
