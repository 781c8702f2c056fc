"""Matmuls and their gradients, for the multiplication order of each platform."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax import machine
from convbert_jax.ops import dispatch, partitioning, products
from convbert_jax.ops.embedding import attend, embedding_lookup
from convbert_jax.ops.products import dense, einsum, fused_dense, grouped_dense
from tests.ops.definitions import assert_close, make_mesh, normal, run
from tests.running import needs_libtpu

SIZES = {"a": 3, "b": 5, "i": 4, "o": 17, "h": 2, "v": 41, "e": 4}
# Inputs wider and narrower than outputs, a table used from either side, batched axes.
EQUATIONS = [
    *("abi,io->abo", "abo,oi->abi", "abe,ve->abv", "abv,ve->abe", "ai,io->ao"),
    *("habi,hio->habo", "ahi,hio->aho", "abhi,hio->abo", "bhi,ahi->bha"),
]


@pytest.mark.parametrize(
    ("equation", "dtype"), [(e, ("bfloat16", "float32")[i % 2]) for i, e in enumerate(EQUATIONS)]
)
def test_products_and_their_gradients(equation, dtype):
    """Parameters and their gradients are float32 for any dtype of the other operand."""
    operands, result = equation.split("->")
    left, right = operands.split(",")
    shapes = ([SIZES[axis] for axis in axes] for axes in (left, right, result))
    x, y, weights = (x.astype(dtype) for x in normal(0, *shapes))
    y, weights = (array.astype(jnp.float32) for array in (y, weights))
    found = run(lambda x, y: einsum(equation, x, y, jnp.float32), (x, y), weights)
    assert [array.dtype for array in found] == ["float32", dtype, "float32"]
    exact = [np.asarray(array, np.float64) for array in (x, y, weights)]
    rounded = 1e-2 if dtype == "bfloat16" else 1e-6
    wanted = (
        np.einsum(equation, *exact[:2]),
        np.einsum(f"{result},{right}->{left}", exact[2], exact[1]),
        np.einsum(f"{left},{result}->{right}", exact[0], exact[2]),
    )
    assert_close(found[1:2], wanted[1:2], rounded)
    assert_close(found[::2], wanted[::2], 1e-5)


def test_on_a_gpu_a_large_product_is_written_as_it_is_wanted(monkeypatch):
    """Matmuls that may be split along K (small outputs, sums over rows) accumulate in float32."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(products, "_FILLS_A_GPU", 32 * 8)
    x, kernel, bias = jnp.ones((4, 8, 16), jnp.bfloat16), jnp.ones((16, 8)), jnp.ones(8)

    def written(function, *arguments):
        found = str(jax.make_jaxpr(function)(*arguments))
        return re.findall(r"(\w+)\[[\d,]*\] = dot_general", found)

    def loss(x, kernel, bias):
        return dense(x, kernel, bias, x.dtype).astype(jnp.float32).sum()

    assert written(lambda x: dense(x, kernel, bias, x.dtype), x) == ["bf16"]
    assert written(lambda x: dense(x[:2], kernel, bias, x.dtype), x) == ["f32"]
    monkeypatch.setattr(
        products.partitioning, "splits_heads", lambda: True
    )  # partial sums of devices
    assert set(written(jax.grad(loss, (0, 1, 2)), x, kernel, bias)) == {"f32"}
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(products, "_FILLS_A_GPU", 32 * 8)
    # forward, gradient of x, gradient of the kernel
    assert sorted(written(jax.grad(loss, (0, 1, 2)), x, kernel, bias)) == ["bf16", "bf16", "f32"]


@pytest.mark.parametrize("shape", [(8,), (4, 1, 8), (1, 8)])
def test_on_a_gpu_the_gradient_of_a_bias_is_a_float32_sum(shape, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (4, 1024, 16)).astype(jnp.bfloat16)
    kernel, bias = jax.random.normal(keys[1], (16, 8)), jax.random.normal(keys[2], shape)

    def gradient(dtype):
        def loss(bias):
            out = dense(x.astype(dtype), kernel, bias, dtype).astype(jnp.float32)
            return (out * out.shape[1] ** 0.5).sum()

        return jax.grad(loss)(bias)

    found = gradient(jnp.bfloat16)
    assert found.dtype == jnp.float32
    # in bfloat16 1,024 ones sum to 256
    np.testing.assert_allclose(found, gradient(jnp.float32), rtol=1e-6)


@pytest.mark.parametrize(
    ("equation", "x_shape", "y_shape"),
    [
        ("abi,io->abo", (1, 1, 6), (6, 5)),  # a dense layer on one position of one text
        ("abe,ve->abv", (1, 1, 6), (9, 6)),
        ("ai,io->ao", (1, 6), (6, 5)),
        ("bhqd,bhdk->bhqk", (3, 2, 1, 4), (3, 2, 4, 7)),  # one query and all earlier positions
        ("bhqk,bhkd->bhqd", (3, 2, 1, 7), (3, 2, 7, 4)),
        ("bgi,gio->bgo", (1, 2, 3), (2, 3, 4)),
    ],
)
def test_on_a_tpu_a_vector_is_multiplied_as_a_matrix(equation, x_shape, y_shape, monkeypatch):
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(k, s) for k, s in zip(keys, (x_shape, y_shape), strict=True))
    wanted = jnp.einsum(equation, x, y)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    np.testing.assert_allclose(einsum(equation, x, y, x.dtype), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "pads"), [(1, True), (2, False)])
def test_a_matrix_is_multiplied_as_it_is(rows, pads, monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    x, y = jnp.ones((1, rows, 6)), jnp.ones((6, 5))
    program = jax.jit(lambda x, y: einsum("abi,io->abo", x, y, x.dtype)).lower(x, y)
    assert ("stablehlo.pad" in program.as_text()) == pads


def test_on_a_cpu_the_smaller_factor_is_turned_over():
    """The gradient transposes hidden states [1536, 128] instead of logits [1536, 8000]."""
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs alone")
    x, y = jnp.ones((1_536, 128)), jnp.ones((8_000, 128))

    def loss(x, y):
        return einsum("ae,ve->av", x, y, jnp.float32).sum()

    program = jax.jit(jax.grad(loss, argnums=1)).lower(x, y).compile().as_text()
    assert "f32[8000,1536]" not in program


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(
    ("equation", "of_matrices"), [("ai,io->ao", True), ("abi,bio->abo", False)]
)
def test_a_cpu_multiplies_bfloat16_where_it_has_a_matrix_unit(
    equation, of_matrices, unit, monkeypatch
):
    """Only unbatched matmuls: XLA:CPU does not support other bfloat16 matmuls."""
    if jax.default_backend() != "cpu":
        pytest.skip("of CPUs alone")
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda: unit)
    shapes = {"a": 5, "b": 2, "i": 4, "o": 3}
    operands = equation.split("->")[0].split(",")
    x, y = (jnp.ones([shapes[a] for a in axes], jnp.bfloat16) for axes in operands)

    def product(x, y):
        return einsum(equation, x, y, jnp.float32)

    def multiplies_bfloat16(function, *arguments):
        lowered = jax.jit(function).lower(*arguments).as_text()
        factors = [line.split(":")[-1] for line in lowered.splitlines() if "dot_general" in line]
        assert factors
        assert all("xf32>" in line.split("->")[1] for line in factors)
        return {"xbf16>" in line.split("->")[0] for line in factors}

    assert multiplies_bfloat16(product, x, y) == {unit and of_matrices}
    seeds = multiplies_bfloat16(jax.vmap(product), jnp.stack([x, x]), jnp.stack([y, y]))
    assert seeds == {False}


@pytest.mark.parametrize("rows", [7, 300])
def test_products_of_a_matrix_unit_add_up_in_float32(rows):
    """Checks the forward pass, and gradients with and without transposition, against float64."""
    if jax.default_backend() != "cpu" or not machine.multiplies_bfloat16():
        pytest.skip("needs a CPU with a matrix unit for bfloat16 (AMX)")
    keys = jax.random.split(jax.random.key(0), 3)
    for width in (40, 600):
        x, y, g = (
            jax.random.normal(key, shape).astype(jnp.bfloat16)
            for key, shape in zip(keys, ((2, rows, 40), (40, width), (2, rows, width)), strict=True)
        )
        out, back = jax.vjp(lambda x, y: einsum("abi,io->abo", x, y, jnp.float32), x, y)
        d_x, d_y = back(g.astype(jnp.float32))
        wide = [np.asarray(array, np.float64) for array in (x, y, g)]
        np.testing.assert_allclose(out, wide[0] @ wide[1], rtol=1e-5, atol=1e-4)
        exact = np.einsum("abi,abo->io", wide[0], wide[2])
        np.testing.assert_allclose(np.float64(d_y), exact, rtol=1e-2, atol=1e-2)
        np.testing.assert_allclose(np.float64(d_x), wide[2] @ wide[1].T, rtol=1e-2, atol=1e-2)


def test_gradients_of_seeds_together_are_those_of_each():
    """Regression: a vmapped transposed matmul crashed (a head of two labels on three texts)."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, y = jax.random.normal(keys[0], (2, 3, 32)), jax.random.normal(keys[1], (2, 32, 2))

    def loss(y, x):
        return jnp.square(einsum("ai,io->ao", x, y, jnp.float32)).sum()

    both = jax.grad(loss, argnums=(0, 1))
    for axes, texts in (((0, 0), x), ((0, None), x[0])):
        together = jax.jit(jax.vmap(both, in_axes=axes))(y, texts)
        for seed in range(2):
            alone = both(y[seed], x[seed] if axes[1] == 0 else x[0])
            for many, one in zip(together, alone, strict=True):
                np.testing.assert_allclose(many[seed], one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("platform", "rows"), [("cpu", (5,)), ("tpu", (5,)), ("tpu", (3, 5))])
def test_layers_of_one_input_are_each_of_them(platform, rows, monkeypatch):
    """Layers have different widths; on a TPU the input gradient is one matmul."""
    monkeypatch.setattr(dispatch, "platform", lambda: platform)
    keys = iter(jax.random.split(jax.random.key(0), 9))
    x = jax.random.normal(next(keys), (*rows, 4))
    kernels = [jax.random.normal(next(keys), (4, width)) for width in (6, 2, 9)]
    biases = [jax.random.normal(next(keys), (width,)) for width in (6, 2, 9)]

    def together(x, kernels, biases):
        return fused_dense(x, kernels, biases, jnp.float32)

    def each(x, kernels, biases):
        return [dense(x, *one, jnp.float32) for one in zip(kernels, biases, strict=True)]

    (found, back), (wanted, wanted_back) = (
        jax.vjp(function, x, kernels, biases) for function in (together, each)
    )
    ours, theirs = (found, back(wanted)), (wanted, wanted_back(wanted))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    products = str(jax.make_jaxpr(back)(wanted)).count("dot_general")
    assert products == {"cpu": 6, "tpu": 4}[platform]


@pytest.mark.parametrize("equation", ["abe,ve->abv", "ai,io->ao"])
def test_gradients_are_sent_in_another_dtype_after_each_device_has_added_up_its_rows(equation):
    x, y, weights, want_whole = _rows_of_eight(equation)

    def gradient(x, y, weights):
        with partitioning.communicate_gradients_in(jnp.bfloat16):
            return jax.grad(lambda y: (einsum(equation, x, y, jnp.float32) * weights).sum())(y)

    with jax.set_mesh(_mesh()):
        found = jax.jit(gradient)(x, y, weights)
        lowered = jax.jit(gradient).lower(x, y, weights).as_text()
    assert found.dtype == jnp.float32
    # Rounded to bfloat16; the error is at most that of eight rounded parts and their rounded sum.
    np.testing.assert_array_equal(found, found.astype(jnp.bfloat16).astype(jnp.float32))
    parts = np.abs([want_whole(x[i::8], weights[i::8]) for i in range(8)]).sum(0)
    assert (np.abs(found - want_whole(x, weights)) <= parts * 2**-6).all()
    assert np.abs(found - want_whole(x, weights)).max() > 0
    assert f"8x{'x'.join(map(str, y.shape))}xbf16" in lowered


@pytest.mark.parametrize("sent", [None, jnp.bfloat16])
def test_of_a_product_of_groups_what_is_on_the_diagonal_is_sent(sent, monkeypatch):
    """On a TPU a grouped matmul is one dense matmul, so kernel and gradient have full size."""
    keys = jax.random.split(jax.random.key(0), 2)
    x, kernel = jax.random.normal(keys[0], (16, 5, 6)), jax.random.normal(keys[1], (2, 3, 4))

    def gradients(x, kernel):
        with partitioning.communicate_gradients_in(sent):
            return jax.grad(
                lambda *both: jnp.square(grouped_dense(*both, None, jnp.float32)).sum(), (0, 1)
            )(x, kernel)

    wanted = gradients(x, kernel)
    monkeypatch.setattr(dispatch, "platform", lambda: "tpu")
    with jax.set_mesh(_mesh()):
        found = jax.jit(gradients)(x, kernel)
        lowered = jax.jit(gradients).lower(x, kernel).as_text()
    for one, other in zip(found, wanted, strict=True):
        tolerance = 1e-5 if sent is None else 1e-2
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())
    assert f"8x2x3x4x{'bf16' if sent else 'f32'}" in lowered


def test_nothing_is_rounded_where_rows_are_on_one_device():
    equation = "abi,io->abo"
    x, y, weights, want_whole = _rows_of_eight(equation)

    def gradient(x, y, weights):
        with partitioning.communicate_gradients_in(jnp.bfloat16):
            return jax.grad(lambda y: (einsum(equation, x, y, jnp.float32) * weights).sum())(y)

    with jax.set_mesh(make_mesh(data=1, fsdp=1, tensor=8)):
        found = jax.jit(gradient)(x, y, weights)
    np.testing.assert_allclose(found, want_whole(x, weights), rtol=1e-5, atol=1e-5)


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_tpu_program_sends_half_the_bytes():
    """A table that is read twice, and matmuls that share an input, in a scan of two layers."""
    from convbert_jax.analysis import hlo
    from convbert_jax.analysis.tpu_devices import open_topology

    devices = open_topology("v5e:2x2").devices
    mesh = make_mesh(devices, data=2, fsdp=2)

    def loss(params, ids):
        table, kernels = params
        if sent := partitioning.grad_comm_dtype():
            table = partitioning.copy_per_device(table, sent)

        def layer(x, kernels):
            return sum(jnp.tanh(y) for y in fused_dense(x, kernels, (None,) * 2, x.dtype)), None

        x, _ = jax.lax.scan(layer, embedding_lookup(table, ids).astype(jnp.bfloat16), kernels)
        return jax.nn.logsumexp(attend(x, table), axis=-1).sum()

    def sent(dtype):
        def gradient(params, ids):
            with partitioning.communicate_gradients_in(dtype):
                return jax.grad(loss)(params, ids)

        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        places = (
            jax.NamedSharding(mesh, jax.P("fsdp", None)),
            (jax.NamedSharding(mesh, jax.P(None, "fsdp", None)),) * 2,
        )
        shapes = (4_096, 128), ((2, 128, 128),) * 2
        params = jax.tree.map(
            lambda shape, place: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place),
            shapes, places, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
        )  # fmt: skip
        ids = jax.ShapeDtypeStruct((64, 128), jnp.int32, sharding=rows)
        with jax.set_mesh(mesh):
            compiled = jax.jit(gradient, out_shardings=places).lower(params, ids).compile()
        found = hlo.find_collectives(compiled.as_text(), dict(mesh.shape))
        return {
            kind: sum(each.sent_bytes for each in found if each.kind == kind) for kind in hlo.KINDS
        }

    as_ever, halved = sent(None), sent(jnp.bfloat16)
    of_gradients = ("all-reduce", "reduce-scatter")
    whole, half = (sum(each[kind] for kind in of_gradients) for each in (as_ever, halved))
    assert whole > 0
    assert whole / 4 < half <= 1.02 * whole / 2
    assert sum(halved.values()) - half <= 1.02 * (sum(as_ever.values()) - whole)


def test_what_is_called_after_the_context_is_sent_as_ever():
    with partitioning.communicate_gradients_in(jnp.bfloat16), jax.set_mesh(_mesh()):
        assert partitioning.grad_comm_dtype() == jnp.bfloat16
        with partitioning.communicate_gradients_in(None):
            assert partitioning.grad_comm_dtype() is None
    with jax.set_mesh(_mesh()):
        assert partitioning.grad_comm_dtype() is None


def _mesh():
    return make_mesh(data=4, fsdp=2, tensor=1)


def _rows_of_eight(equation):
    """Return operands with 16 rows, output weights, and (x, weights) -> float64 gradient of y."""
    operands, result = equation.split("->")
    left, right = operands.split(",")
    sizes = SIZES | {"a": 16}
    random = np.random.default_rng(0)
    x, y, weights = (
        random.normal(size=[sizes[a] for a in axes]).astype(np.float32)
        for axes in (left, right, result)
    )

    def whole(x, weights):
        return np.einsum(f"{left},{result}->{right}", x.astype(np.float64), weights)

    return x, y, weights, whole
