"""The sharded pre-training step goes through the TPU compiler, on a machine without a TPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from benchmarks import step
from convbert_jax import recipes
from convbert_jax.analysis.tpu.collectives import BETWEEN_SLICES, find_collectives
from convbert_jax.analysis.tpu.compiling import compile_as_text
from convbert_jax.analysis.tpu.program import scheduled
from convbert_jax.analysis.tpu.topology import make_devices, open_topology
from convbert_jax.config import MeshSection, ModelSection
from convbert_jax.config.sequences import SequenceSection, derive_language_model
from convbert_jax.decoding import search
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.models.sequences.networks import LanguageModel
from convbert_jax.recipes.planning.tpu_slice import plan_slice
from convbert_jax.training import sharding
from convbert_jax.training.program import make_program
from tests.end_to_end.test_devices import small_config
from tests.running import needs_libtpu

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.slow,
    needs_libtpu,
]


CHIPS = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:1x1", "tpu7x:2x2x1"]


# (batch, length, heads, head width): base at both lengths, small, medium_small, tiny, odd ones.
SHAPES = [
    (8, 512, 6, 64),
    (16, 128, 6, 64),
    (16, 128, 2, 64),
    (16, 128, 4, 48),
    (16, 64, 2, 32),
    (2, 40, 1, 64),
    (2, 1300, 3, 80),
    (2, 4096, 12, 64),  # more than the memory of a core holds
]


@pytest.mark.parametrize(
    ("chip", "batch", "length", "heads", "width", "compute"),
    [
        *((chip, *SHAPES[1], "bfloat16") for chip in CHIPS if chip != "v5e:2x2"),
        *(("v5e:2x2", *shape, "bfloat16") for shape in SHAPES),
        *(("v5e:2x2", *shape, "float32") for shape in SHAPES[:4]),  # the paper variants
    ],
)
@pytest.mark.parametrize(("packed", "causal"), [(True, False), (False, False), (True, True)])
def test_kernels_compile(chip, batch, length, heads, width, compute, packed, causal):
    """Forward and backward of each op are Mosaic kernels in the program, under `auto` too."""
    from convbert_jax.ops.depthwise_conv import depthwise_conv
    from convbert_jax.ops.dynamic_conv import dynamic_conv
    from convbert_jax.ops.span_dynamic_conv import span_dynamic_conv

    devices = make_devices(chip)[:1]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    place = jax.NamedSharding(mesh, jax.P())

    def shape(*sizes, dtype=compute):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=place)

    ids = shape(batch, length, dtype=jnp.int32)
    channels = heads * width
    wide, by_head = shape(batch, length, channels), shape(batch, length, heads, width)
    programs = {
        "dynamic_conv": (
            lambda i, *a, **o: dynamic_conv(*a, segment_ids=i, **o),
            (by_head, shape(batch, length, heads, 9)),
        ),
        "span_dynamic_conv": (
            lambda i, *a, **o: span_dynamic_conv(*a, heads=heads, segment_ids=i, **o),
            (wide, wide, wide, shape(channels, heads * 9), shape(heads * 9)),
        ),
        "depthwise_conv": (
            lambda i, *a, **o: depthwise_conv(*a, segment_ids=i, **o), (wide, shape(9, channels))
        ),
        "light": (
            lambda i, *a, **o: dynamic_conv(*a, segment_ids=i, **o), (by_head, shape(heads, 9))
        ),
    }  # fmt: skip
    for name, (function, arrays) in programs.items():

        def both(ids, *arrays, function=function):
            ids = ids if packed else None
            out, back = jax.vjp(functools.partial(function, ids, causal=causal), *arrays)
            return out, back(out)

        with jax.set_mesh(mesh):
            text = jax.jit(both).lower(ids, *arrays).compile().as_text()
        assert text.count('custom_call_target="tpu_custom_call"') == 2, name


@pytest.mark.parametrize("chip", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_large_lookup_can_be_read(chip):
    """jaxlib cannot read how it is started on a SparseCore; the sum over devices is seen too."""
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
    mesh = sharding.make_mesh(MeshSection(data=2, fsdp=2), topology.devices)
    program = make_program(task, config, mesh)
    shape = (config.train.batch_size, config.data.length)
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=program.rows)
        for name in ("tokens", "segment_ids", "type_ids")
    }
    with jax.set_mesh(mesh):
        lowered = program.train_step.lower(program.abstract, batch)
    assert ("bf16" in lowered.as_text()) != paper  # compute dtype of an accelerator
    compiled = lowered.compile()
    text = compiled.as_text()
    assert "tpu_custom_call" in text  # on a mesh too, the convolution is ours
    assert compiled.memory_analysis().temp_size_in_bytes < 16e9


@pytest.mark.parametrize("topology", ["2xv5e:2x2", "2xv5p:2x2x1", "2xv6e:2x2"])
def test_step_compiles_for_two_slices(topology):
    """A chip sends the other slice its part of large gradients and all of small ones; tiny has
    mostly small ones.
    """
    fields = {"model.layers": 1, "train.steps": 100, "optimizer.warmup_steps": 10}
    config = step.read_config("tiny", "128x64", fields)
    settings = {"largest_batch": False, "compare": False, "price": None}
    numbers = plan_slice(config, open_topology(topology), **settings).numbers
    between = [each for each in numbers["collectives"] if each["axes"] == BETWEEN_SLICES]
    sent = sum(each["sent_bytes"] for each in between)
    parameters = numbers["memory"]["parameters"]
    assert parameters / 4 < sent < 0.95 * parameters


@pytest.mark.parametrize("mixer", ["attention", "mixed", "dynamic", "light", "dilated"])
def test_a_language_model_goes_on_from_prompts(mixer):
    """Given tokens are read at once, by the kernels where there is a convolution, then a beam."""
    model = ModelSection(layers=2, hidden_size=128, embedding_size=128, heads=2, mixer=mixer)
    config = derive_language_model(model, SequenceSection(norm="pre"), 1_000)
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
    kernels = text.count('custom_call_target="tpu_custom_call"')
    # Of the last layer the state alone is wanted, which asks for no convolution.
    assert kernels == (0 if mixer == "attention" else {"mixed": 2}.get(mixer, 1))
