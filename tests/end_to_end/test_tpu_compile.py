"""Kernels, decoding and sharded training steps compile for TPUs without a TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from benchmarks import step
from convbert_jax import recipes
from convbert_jax.analysis import tpu_pricing
from convbert_jax.analysis.hlo import BETWEEN_SLICES, compile_as_text, find_collectives, scheduled
from convbert_jax.analysis.tpu_devices import make_devices, open_topology
from convbert_jax.config import MeshSection, ModelSection
from convbert_jax.config.network import derive_language_model
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.decoding import search
from convbert_jax.interfaces import SpecialIds
from convbert_jax.models.networks import LanguageModel
from convbert_jax.ops.attention import attention, pallas_tpu
from convbert_jax.ops.nn import Dropout
from convbert_jax.ops.tpu.attention import longest
from convbert_jax.recipes.planning import plan_slice
from convbert_jax.training import partitioning
from convbert_jax.training.train_step import make_program
from tests.end_to_end.test_devices import small_config
from tests.ops import definitions
from tests.ops.definitions import BF16, F32, OPS
from tests.pairwise import pairwise
from tests.running import needs_libtpu

pytestmark = [pytest.mark.tpu_compile, needs_libtpu]


CHIPS = ["tpu:v4", "tpu:v5e", "tpu:v5p", "tpu:v6e", "tpu:tpu7x"]
# (batch, length, heads, head width): base at both lengths, medium_small, odd sizes, short rows,
# rows that exceed the memory of a core. Attention needs multiples of 128 positions.
SIZES = [
    (8, 512, 6, 64), (16, 128, 6, 64), (16, 128, 4, 48), (2, 1300, 3, 80), (2, 40, 1, 64),
    (2, 4096, 12, 64),
]  # fmt: skip
OF_ATTENTION = [
    (8, 512, 6, 64), (64, 128, 12, 64), (16, 128, 4, 32), (3, 384, 3, 64), (64, 128, 1, 64),
    (2, 640, 6, 128),
]  # fmt: skip
FORMS = [("packed", False), ("packed", True), ("whole", False)]  # segments, causal
TAPS = 9


def compile_both(function, arrays, *others, chip):
    """Compile function(*others, *arrays) and its gradients; return the program."""

    def both(arrays, others):
        out, back = jax.vjp(functools.partial(function, *others), *arrays)
        return out, back(out)

    return tpu_pricing.compile_for(both, arrays, others, target=chip).as_text()


def count_kernels(text: str) -> int:
    return text.count('custom_call_target="tpu_custom_call"')


@pytest.mark.parametrize(
    ("op", "size", "chip", "dtype", "form"),
    pairwise([*OPS, "attention"], range(len(SIZES)), CHIPS, [BF16, F32], FORMS),
)
def test_kernels_compile(op, size, chip, dtype, form):
    """Forward and backward are one Mosaic kernel each, and `auto` chooses them."""
    batch, length, heads, width = (OF_ATTENTION if op == "attention" else SIZES)[size]
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    options = {"causal": form[1]}
    if op == "attention":
        arrays = [jax.ShapeDtypeStruct((batch, length, heads, width), dtype)] * 3
        function = functools.partial(attention, implementation="pallas_tpu")
    else:
        arrays, _ = jax.eval_shape(
            lambda: definitions.draw(op, batch, length, heads, width, TAPS, dtype)
        )
        function = functools.partial(OPS[op], heads=heads)

    def run(ids, seed, *arrays):
        given = dict(options, segment_ids=ids if form[0] == "packed" else None)
        if op == "attention" and given["segment_ids"] is not None:
            given["drop"] = Dropout(0.1, jax.random.wrap_key_data(seed))
        return function(*arrays, **given)

    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    assert count_kernels(compile_both(run, arrays, ids, seed, chip=chip)) == 2


@pytest.mark.parametrize(("chip", "width", "dtype"), pairwise(CHIPS, [32, 64, 128], [F32, BF16]))
def test_the_longest_rows_of_attention_compile(chip, width, dtype):
    with jax.set_mesh(tpu_pricing.make_mesh(chip)):
        length = longest(dtype, width)
    arrays = [jax.ShapeDtypeStruct((2, length, 256 // width, width), dtype)] * 3
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)

    def run(ids, seed, *arrays):
        drop = Dropout(0.1, jax.random.wrap_key_data(seed))
        return pallas_tpu(*arrays, ids, ids, True, 0, drop=drop)

    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    assert count_kernels(compile_both(run, arrays, ids, seed, chip=chip)) == 2


@pytest.mark.parametrize(
    ("length", "rate", "window", "taken"),
    [
        (128, 0.1, 0, "pallas"),
        (512, 0.0, 0, "pallas"),
        (4096, 0.0, 0, "splash"),
        (4096, 0.0, 64, "pallas"),
    ],
)
def test_attention_by_auto(length, rate, window, taken):
    def run(ids, seed, *arrays):
        drop = Dropout(rate, jax.random.wrap_key_data(seed)) if rate else None
        return attention(*arrays, segment_ids=ids, drop=drop, window=window)

    arrays = [jax.ShapeDtypeStruct((2, length, 2, 64), BF16)] * 3
    ids = jax.ShapeDtypeStruct((2, length), jnp.int32)
    seed = jax.ShapeDtypeStruct((2,), jnp.uint32)
    text = compile_both(run, arrays, ids, seed, chip="tpu:v5e")
    names = [o.name for o in scheduled(text) if o.kernel]
    assert len(names) == 2
    assert all(("splash" in name) == (taken == "splash") for name in names)


def test_seeds_as_an_axis_compile():
    def run(ids, seed, *arrays):
        drop = Dropout(0.1, jax.random.wrap_key_data(seed))
        return pallas_tpu(*arrays, ids, ids, False, 0, drop=drop)

    arrays = [jax.ShapeDtypeStruct((3, 4, 128, 2, 64), BF16)] * 3
    ids = jax.ShapeDtypeStruct((3, 4, 128), jnp.int32)
    seed = jax.ShapeDtypeStruct((3, 2), jnp.uint32)
    text = compile_both(jax.vmap(run), arrays, ids, seed, chip="tpu:v5e")
    assert count_kernels(text) == 2


@pytest.mark.parametrize("chip", ["v5e:2x2", "v6e:2x2"])
def test_a_large_lookup_can_be_read(chip):
    """jaxlib cannot parse its launch on a SparseCore; the all-reduce must be found too."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=devices)

    def shape(*sizes, axis=None, dtype=jnp.float32):
        place = jax.NamedSharding(mesh, jax.P(axis))
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    def function(table, ids, kernel):
        return (jnp.take(table, ids, axis=0) @ kernel).sum(0)

    ids = shape(1 << 16, axis="data", dtype=jnp.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).lower(shape(30522, 128), ids, shape(128, 128))
    _, text = compile_as_text(lowered)
    operations = scheduled(text)
    assert sum(o.times * o.cycles for o in operations if o.cycles) > 0
    beside = [o for o in operations if o.name.startswith("gather_offload")]
    assert len(beside) == (0 if chip.startswith("v5e") else 1)
    (sent,) = find_collectives(text, dict(mesh.shape))
    assert (sent.kind, sent.axes, sent.array_bytes) == ("all-reduce", "data", 4 * 128)


@pytest.mark.parametrize("paper", [False, True], ids=["default", "paper"])
def test_step_compiles_for_four_chips_of_v5e(paper):
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    config = small_config()
    if paper:
        once = dataclasses.replace(config.optimizer, release_replicas=2)
        config = dataclasses.replace(config, compute_dtype="float32", optimizer=once)
    else:
        train = dataclasses.replace(config.train, accumulation=2)
        config = dataclasses.replace(config, train=train)
    special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
    task = recipes.build_task(config, special, topology.devices[0])
    assert task.peak_flops_per_device == pytest.approx(197e12)
    mesh = partitioning.make_mesh(MeshSection(data=2, fsdp=2), topology.devices)
    program = make_program(task, config, mesh)
    shape = (config.train.batch_size, config.data.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=program.rows)
        for name in ("tokens", "segment_ids", "type_ids")
    }
    with jax.set_mesh(mesh):
        lowered = program.train_step.lower(program.abstract, batch)
    assert ("bf16" in lowered.as_text()) != paper  # the compute dtype on accelerators
    compiled = lowered.compile()
    text = compiled.as_text()
    assert "tpu_custom_call" in text  # convolution kernels are used on a mesh too
    assert compiled.memory_analysis().temp_size_in_bytes < 16e9


@pytest.mark.parametrize("topology", ["2xv5e:2x2", "2xv5p:2x2x1"])
def test_step_compiles_for_two_slices(topology):
    """A chip sends the other slice its shard of large gradients and all small gradients.

    The config tiny has mostly small gradients.
    """
    fields = {"model.layers": 1, "train.steps": 100, "optimizer.warmup_steps": 10}
    config = step.read_config("tiny", "128x64", fields)
    settings = {"largest_batch": False, "compare": False, "price": None}
    numbers = plan_slice(config, open_topology(topology), **settings).numbers
    between = [each for each in numbers["collectives"] if each["axes"] == BETWEEN_SLICES]
    sent = sum(each["sent_bytes"] for each in between)
    parameters = numbers["memory"]["parameters"]
    assert parameters / 4 < sent < 0.95 * parameters


@pytest.mark.parametrize(("mixer", "kernels"), [("attention", 0), ("mixed", 2), ("light", 1)])
def test_a_language_model_goes_on_from_prompts(mixer, kernels):
    """The prompt is read in one pass, with convolution kernels if any; then beam search."""
    model = ModelSection(
        layers=2, hidden_size=128, embedding_size=128, heads=2, mixer=mixer, activation="relu",
        norm="pre", position_embedding="sinusoidal",
    )  # fmt: skip
    config = derive_language_model(model, SequenceSection(), 1_000)
    devices = make_devices("v5e:2x2")[:1]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    place = jax.NamedSharding(mesh, jax.P())
    abstract = nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0)))
    graphdef, params = nnx.graphdef(abstract), nnx.to_pure_dict(nnx.state(abstract))
    prompt, first = (jax.ShapeDtypeStruct(sizes, jnp.int32) for sizes in ((4, 64), (4,)))

    def write(params, prompt, first):
        made = nnx.merge(graphdef, params)
        state, read = made.start(prompt, first, copies=2, length=96, dtype=jnp.bfloat16)

        def step(tokens, state, place):
            return made.step(tokens, state, place, read, jnp.bfloat16)

        return search(step, state, prompt, first, beam=2, length=96, end=1)

    def put(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    arguments = jax.tree.map(put, (params, prompt, first))
    with jax.set_mesh(mesh):
        text = jax.jit(write).lower(*arguments).compile().as_text()
    # The prompt needs only the state of the last layer, not its convolution.
    assert count_kernels(text) == kernels
