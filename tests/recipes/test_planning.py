"""Plans of runs on devices that are not here."""

import dataclasses
import json
import math

import jax
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from convbert_jax import recipes
from convbert_jax.analysis import planned
from convbert_jax.analysis.tpu import plan as tpu_plan
from convbert_jax.analysis.tpu.chips import CHIPS
from convbert_jax.analysis.tpu.topology import open_topology
from convbert_jax.config import ConfigError, MeshSection
from convbert_jax.interop.networks import abstract_params
from convbert_jax.recipes.planning import candidates, tpu_slice, traced
from convbert_jax.training import sharding, state
from tests.analysis.test_plan import make_plan, make_step
from tests.recipes.conftest import make_config
from tests.running import needs_libtpu


@settings(max_examples=60)
@example(197, 49, 49, 1)  # nearly full at once: what is predicted beyond does fit
@given(
    st.integers(0, 900), st.integers(1, 60), st.integers(1, 64), st.sampled_from((1, 2, 4)),
)  # fmt: skip
def test_the_search_ends_at_the_largest_batch(fixed, slope, batch, accumulation):
    """Where memory is a line, which it nearly is; every batch that is tried can be trained."""
    capacity, tried = 10_000, []
    axes = {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}

    def fake(config):
        rows = config.train.batch_size
        tried.append(rows)
        used = fixed + slope * rows / accumulation
        memory = tpu_plan.Memory(0, 0, 0, int(used), 0, capacity)
        step = (
            make_step(memory=memory)
            if used <= capacity
            else tpu_plan.Shortage(used, capacity, 0, 0)
        )
        kept = 1.3 * slope * rows / accumulation  # what is asked for is more than what is kept
        return make_plan(step, config=config, rows=rows, axes=axes, kept=kept)

    config = make_config(
        train__batch_size=4 * accumulation * batch, train__accumulation=accumulation
    )
    unit = 4 * accumulation * (8 if batch % 8 == 0 else 1)
    # The largest that fits, by hand; there must be one, and not beyond all reason.
    most = int((capacity - fixed) / slope * accumulation) // unit * unit
    assume(0 < most < 2**20)
    search = candidates.find_largest(fake(config), fake)
    assert all(rows % unit == 0 for rows in tried)
    assert len(tried) <= 1 + candidates._SEARCHES
    assert [trial.plan.rows for trial in search.trials] == tried
    found = search.plan
    assert found is not None
    # What is planned is a bound; of one plan it is not known how much of it grows.
    assert search.next_rows > (most if search.next_planned else found.rows)
    assert search.next_planned == (search.next_rows in tried)
    assert found.fits
    enough = [fixed + slope * rows / accumulation >= 0.97 * capacity for rows in tried]
    fits = [rows <= most for rows in tried]
    assert found.rows >= most - unit or found.used >= 0.97 * capacity
    # A plan takes minutes: none is made after one that nearly fills the memory.
    assert not any(a and b for a, b in zip(enough[:-1], fits[:-1], strict=True))


def test_a_compiler_that_saves_memory_does_not_mislead_the_search():
    """As `base` on v5e:2x4, GiB; a line through 1,792 and 1,920 rows leads to 9,216."""
    tried = []

    def fake(config):
        rows = config.train.batch_size
        tried.append(rows)
        used = min(1.4 + 8.6 / 1024 * rows, 14.7 + rows / 80_000)
        fits = rows <= 2_000
        memory = tpu_plan.Memory(0, 0, 0, int(used * 2**30), 0, int(15.75 * 2**30))
        step = (
            make_step(memory=memory)
            if fits
            else tpu_plan.Shortage(15.8 * 2**30, 15.75 * 2**30, 0, 0)
        )
        axes = {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
        return make_plan(step, config=config, rows=rows, axes=axes)

    found = candidates.find_largest(fake(make_config(train__batch_size=1024)), fake).plan
    assert 1_792 <= found.rows <= 2_000
    assert max(tried) < 2_500


def test_the_search_ends_where_rows_are_dear():
    """As `small` on v5e:2x4: what would nearly fill the memory takes 85% of it, since some of it is
    computed twice.
    """
    tried = []

    def fake(config):
        rows = config.train.batch_size
        tried.append(rows)
        squeezed = rows > 5_600
        memory = tpu_plan.Memory(
            0, int(0.45 * 2**30), 0, int((12.93 if squeezed else 2.31 * rows / 1024) * 2**30), 0,
            int(15.75 * 2**30),
        )  # fmt: skip
        cycles = rows * (536e3 if squeezed else 395e3)
        operations = tpu_plan.Operations(
            {tpu_plan.PRODUCTS: cycles, tpu_plan.KERNELS: 0.0, tpu_plan.OTHER: 0.0}, {}, (), {}
        )
        step = make_step(memory=memory, operations=operations, collectives=())
        axes = {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
        return make_plan(step, config=config, rows=rows, axes=axes)

    search = candidates.find_largest(fake(make_config(train__batch_size=1024)), fake)
    assert tried == [1024, search.plan.rows]
    first, second = search.trials
    assert first.predicted is None
    # By what grows alone: parameters lie there once.
    assert second.predicted == pytest.approx(15.75 * 2**30, rel=0.01)
    assert search.dearer == pytest.approx(536 / 395)
    assert search.gave_up
    assert search.next_rows > search.plan.rows
    assert not search.next_planned


def test_what_does_not_fit_leads_to_what_does():
    """By tracing, where the compiler only tells what was left when it gave up."""
    tried = []

    def fake(config):
        rows = config.train.batch_size
        tried.append(rows)
        fits = rows <= 2_000
        memory = tpu_plan.Memory(100, 200, 0, 4 * rows, 0, 8_300)
        step = make_step(memory=memory) if fits else tpu_plan.Shortage(8_400, 8_300, 100, 200)
        axes = {"data": 8, "fsdp": 1, "tensor": 1, "sequence": 1}
        return make_plan(step, config=config, rows=rows, axes=axes, kept=5 * rows)

    search = candidates.find_largest(fake(make_config(train__batch_size=8192)), fake)
    assert tried[:2] == [8192, 1600]  # (8,300 - 300) / 5
    assert search.plan.rows >= 1_900
    assert search.next_rows in tried
    assert search.next_planned


def test_gpus_are_counted(tmp_path):
    config = make_config(model__hidden_size=128, model__embedding_size=128, train__batch_size=64)
    whole = 4 * state.count(abstract_params(config))

    def count(**changed):
        changed = dataclasses.replace(config, **changed)
        return recipes.plan(changed, tmp_path, topology="gpu:h100x4").numbers["memory"]

    copied = count()
    assert copied["parameters"] == copied["gradients"] == whole
    assert copied["moments"] == pytest.approx(2 * whole, abs=64)  # and how often they were updated
    divided = count(mesh=MeshSection(data=1, fsdp=4))
    assert whole / 4 < divided["parameters"] < whole / 2  # vectors and small ones stay whole
    assert divided["kept"] == copied["kept"]
    twice = count(train=dataclasses.replace(config.train, batch_size=128))
    assert twice["kept"] == 2 * copied["kept"]
    halved = count(train=dataclasses.replace(config.train, accumulation=2))
    assert halved["kept"] == copied["kept"] // 2
    again = count(model=dataclasses.replace(config.model, remat="full"))
    assert again["kept"] < copied["kept"] / 2


def test_a_batch_that_gpus_do_not_divide_is_a_sentence(tmp_path):
    with pytest.raises(sharding.ShardingError, match="does not split into 3 device shards"):
        recipes.plan(make_config(), tmp_path, topology="gpu:h100x3")


def test_this_machine_is_counted_from_its_own_speed(tmp_path):
    config = make_config(train__batch_size=64)
    plan = recipes.plan(config, tmp_path, topology="cpu", price=1.0)
    numbers = plan.numbers
    assert numbers["topology"] == "cpu"
    assert numbers["by"] == "arithmetic"
    best, worst = numbers["seconds_of_a_step"]
    assert best == pytest.approx(numbers["flops"] / numbers["peak_flops"] / 0.65)
    assert worst == pytest.approx(numbers["flops"] / numbers["peak_flops"] / 0.2)
    assert "GFLOP/s that this machine reached just now" in plan.report
    assert "memory of a CPU" in plan.report
    # A batch that no machine holds is planned, not multiplied.
    large = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=2**24))
    plan = recipes.plan(large, tmp_path, topology="cpu")
    assert "products of 4,096 x" in plan.report
    assert not plan.fits
    # The same bytes as on a GPU with the dtype of a CPU.
    config = dataclasses.replace(config, compute_dtype="float32")
    gpu = recipes.plan(config, tmp_path, topology="gpu:h100").numbers["memory"]
    same = ("parameters", "gradients", "moments")
    assert {n: numbers["memory"][n] for n in same} == {n: gpu[n] for n in same}


def test_gpus_are_compared(tmp_path):
    """The largest batch nearly fills the memory; of meshes, then of remat, the best is named."""
    config = make_config(train__batch_size=2**20, model__hidden_size=128)
    asked = {"topology": "gpu:t4x8", "largest_batch": True, "compare": True, "price": 2.0}
    result = recipes.plan(config, tmp_path, **asked)
    numbers = json.loads(json.dumps(result.numbers))
    assert not result.fits
    assert "What helps, the cheapest first: --config.train.batch_size" in result.report
    largest = numbers["largest_batch"]
    assert largest["fits"]
    used, capacity = largest["memory"]["used"], largest["memory"]["capacity"]
    assert 0.9 * 0.92 * capacity < used <= 0.92 * capacity
    # Arithmetic is a line, so that the second plan is where it was predicted.
    _, second = numbers["search"]["trials"]
    assert second["used"] == pytest.approx(second["predicted"])
    assert f"counted: {second['rows']:,} rows" in result.report
    assert numbers["search"]["does_not_fit"]["rows"] > second["rows"]
    assert "times a row of the cheapest" not in result.report  # rows cost the same
    meshes = [tuple(each["mesh"].values()) for each in numbers["compared"]]
    assert {(2, 4, 1, 1), (1, 8, 1, 1), (4, 1, 2, 1), (4, 1, 1, 2)} <= set(meshes)
    assert {each["remat"] for each in numbers["compared"]} == {"none", "dots", "full"}
    assert numbers["recommended"]["remat"] == "full"
    assert numbers["recommended"]["flags"] in result.report
    best, worst = numbers["seconds_of_a_step"]
    hours = [seconds * config.train.steps * 8 / 3600 for seconds in (best, worst)]
    assert numbers["chip_hours"] == pytest.approx(hours)
    assert numbers["price"] == pytest.approx([2.0 * each for each in hours])


def test_other_meshes_keep_what_a_run_needs():
    def sizes(*axes):
        found = candidates.other_meshes(dict(zip(sharding.AXES, axes, strict=True)))
        return [dataclasses.astuple(mesh) for mesh in found]

    assert sizes(16, 1, 1, 1) == [
        (4, 4, 1, 1), (2, 8, 1, 1), (1, 16, 1, 1), (8, 1, 2, 1), (8, 1, 1, 2),
    ]  # fmt: skip
    assert sizes(2, 1, 1, 8) == [(1, 2, 1, 8), (1, 1, 2, 8), (4, 1, 1, 4), (1, 1, 1, 16)]


def test_what_is_computed_again_is_compared_on_the_best_mesh():
    """The fastest that fits is recommended; a mesh that cannot be is left out."""

    def fake(config):
        m = config.mesh
        axes = dict(zip(sharding.AXES, dataclasses.astuple(m), strict=True))
        if m.tensor > 1:
            raise sharding.ShardingError("it does not divide the heads")
        fits = m.fsdp > 1
        memory = tpu_plan.Memory(0, 0, 0, 90, 0, 100)
        step = make_step(memory=memory) if fits else tpu_plan.Shortage(200, 100, 0, 0)
        return make_plan(step, config=config, axes=axes)

    first = fake(make_config(mesh__data=16))
    compared = candidates.compare(first, fake)
    again = [each for each in compared if each.config.model.remat != "none"]
    assert [each.config.model.remat for each in again] == ["dots", "full"]
    assert {each.axes["fsdp"] for each in again} == {4}
    assert all(each.axes["tensor"] == 1 for each in compared)
    assert planned.recommend([first, *compared]).axes["fsdp"] == 4


@pytest.mark.parametrize("recipe", ["replaced_token", "masked_lm", "causal_lm", "span_corruption"])
def test_a_batch_has_the_shapes_of_training(recipe):
    config = make_config(recipe=recipe, train__batch_size=6)
    batch = traced.make_batch(config)
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "segment_ids", "type_ids"), (6, 32)
    )
    task = traced.make_task(config, jax.devices()[0])
    loss, _ = jax.eval_shape(
        task.loss, abstract_params(config), batch, jax.random.key(0), *task.phase(0)
    )
    assert loss.shape == ()


def test_pairs_are_planned_at_their_longest(tmp_path):
    config = make_config(
        recipe="translation",
        parallel__max_length=32,
        parallel__batch_tokens=1000,
        parallel__source="parallel:a,b",
    )
    batch = traced.make_batch(config, shards=4)
    assert {x.shape for x in batch.values()} == {(28, 32)}
    plan = recipes.plan(config, tmp_path, topology="gpu:l4x4")
    assert plan.numbers["tokens"] == 2 * 28 * 32
    assert plan.fits


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_slice_is_compiled_for(tmp_path):
    """What lies on a device and what is sent are arithmetic; the compiler must agree."""
    config = make_config(
        recipe="masked_lm", train__batch_size=64, model__hidden_size=128,
        model__embedding_size=128, compute_dtype="bfloat16",
    )  # fmt: skip
    file = tmp_path / "plan.json"
    result = recipes.plan(config, tmp_path, topology="v5e:2x2", price=1.0, output=str(file))
    numbers = json.loads(file.read_text())
    assert numbers == json.loads(json.dumps(result.numbers))
    assert result.fits
    whole = 4 * state.count(abstract_params(config))
    memory = numbers["memory"]
    assert memory["parameters"] == whole
    assert memory["optimizer"] == pytest.approx(2 * whole, abs=64)
    batch = 3 * 16 * 32 * 4
    assert batch <= memory["batch"] <= batch + 2**16  # each array begins at a multiple
    assert memory["used"] < memory["capacity"] == 15.75 * 2**30
    assert numbers["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    reduced = [c for c in numbers["collectives"] if c["kind"] == "all-reduce"]
    assert {c["axes"] for c in reduced} == {"data"}
    # Every gradient crosses the network, once.
    least = 2 * 3 / 4 * whole
    assert least <= sum(c["sent_bytes"] for c in reduced) < 1.05 * least
    assert numbers["cycles"]["matrix products"] > 0
    parts = numbers["cycles_by_part"]
    assert sum(parts.values()) - parts[tpu_plan.WAITING] == pytest.approx(
        sum(numbers["cycles"].values())
    )
    assert [part for part, size in parts.items() if not size] == ["convolution branch"]
    assert parts[tpu_plan.REST] < 0.2 * sum(parts.values())
    low, high = numbers["seconds_of_a_step"]
    assert 0 < low < high
    assert numbers["traced_activation_bytes"] > 0
    for words in ("v5e:2x2: 4 chips", "all-reduce over data", "chip-hours", "at 1 each"):
        assert words in result.report


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
def test_meshes_of_a_slice_are_compared(tmp_path, monkeypatch):
    """Each of them compiled: one of either kind that a comparison has."""
    monkeypatch.setattr(candidates, "REMAT", ("none", "full"))
    monkeypatch.setattr(candidates, "other_meshes", lambda axes: [MeshSection(2, 1, 2, 1)])
    config = make_config(
        recipe="masked_lm", train__batch_size=64, model__hidden_size=128,
        model__embedding_size=128, compute_dtype="bfloat16",
    )  # fmt: skip
    result = recipes.plan(config, tmp_path, topology="v5e:2x2", compare=True)
    numbers = json.loads(json.dumps(result.numbers))
    of_mesh, of_remat = numbers["compared"]
    assert tuple(of_mesh["mesh"].values()) == (2, 1, 2, 1)
    assert of_remat["remat"] == "full"
    plans = [numbers, of_mesh, of_remat]
    assert all(each["fits"] for each in plans)
    fastest = min(plans, key=lambda each: sum(each["seconds_of_a_step"]))
    assert numbers["recommended"]["mesh"] == fastest["mesh"]
    assert numbers["recommended"]["flags"] in result.report.splitlines()[-1]
    assert len([line for line in result.report.splitlines() if " remat=" in line]) == 3


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
def test_the_largest_batch_of_a_slice_is_compiled(monkeypatch):
    """One compilation after the first, of a chip that is said to have 4 GiB: near the end of the
    real memory a compilation takes many minutes.
    """
    monkeypatch.setattr(candidates, "_SEARCHES", 1)
    config = make_config(
        recipe="masked_lm", train__batch_size=2**14, model__hidden_size=128,
        model__embedding_size=128, compute_dtype="bfloat16",
    )  # fmt: skip
    topology = open_topology("v5e:2x2")
    chip = dataclasses.replace(topology.chip, hbm_bytes=4.0 * 2**30)
    small = dataclasses.replace(topology, chip=chip)
    numbers = tpu_slice.plan_slice(
        config, small, largest_batch=True, compare=False, price=None
    ).numbers
    first, second = numbers["search"]["trials"]
    assert first["used"] == numbers["memory"]["used"]
    assert second["fits"]
    assert second["predicted"] == pytest.approx(4 * 2**30, rel=0.05)
    assert second["used"] == pytest.approx(second["predicted"], rel=0.15)
    largest = numbers["largest_batch"]
    assert largest["rows"] == second["rows"] > 2**14
    assert largest["memory"]["used"] == second["used"]
    assert numbers["search"]["does_not_fit"]["rows"] > second["rows"]


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("kind", CHIPS)
def test_every_kind_of_chip_is_planned_for(kind, tmp_path, capfd):
    config = make_config(
        recipe="masked_lm", train__batch_size=64, model__hidden_size=128,
        model__embedding_size=128, compute_dtype="bfloat16",
    )  # fmt: skip
    sides = "2x2x1" if CHIPS[kind].ports == 6 else "2x2"
    result = recipes.plan(config, tmp_path, topology=f"{kind}:{sides}")
    assert "stack trace" not in capfd.readouterr().err
    numbers = result.numbers
    assert numbers["fits"]
    assert numbers["memory"]["capacity"] == int(CHIPS[kind].hbm_bytes)
    devices = math.prod(numbers["mesh"].values())
    assert devices == (8 if kind == "tpu7x" else 4)
    # The gradient is summed over all devices, by whatever part of a chip.
    least = 2 * (devices - 1) / devices * 4 * state.count(abstract_params(config))
    reduced = [c for c in numbers["collectives"] if c["kind"] == "all-reduce"]
    assert {c["axes"] for c in reduced} == {"data"}
    assert least <= sum(c["sent_bytes"] for c in reduced) < 1.05 * least
    assert not any(name.startswith("all-reduce") for name in numbers["unestimated"])


@pytest.mark.tpu_compile
@needs_libtpu
def test_what_does_not_fit_is_an_answer(tmp_path):
    """Of a batch whose arrays are each larger than the memory the compiler says so in seconds; what
    takes a few times too much it tries to make smaller first, for minutes.
    """
    config = make_config(
        recipe="masked_lm", train__batch_size=2**20, model__ffn_size=2**15,
        compute_dtype="bfloat16",
    )  # fmt: skip
    result = recipes.plan(config, tmp_path, topology="v5e:2x2")
    memory = result.numbers["memory"]
    assert not result.fits
    assert memory["capacity"] == 15.75 * 2**30
    # One array behind the first half of a feed-forward block.
    assert memory["needed"] > 2**20 / 4 * 32 * 2**15 * 2 > memory["capacity"]
    assert "DOES NOT FIT" in result.report
    assert "by tracing activations that wait for the backward pass" in result.report


@needs_libtpu
def test_a_slice_that_does_not_exist_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="no slice of v5e is 3x7"):
        open_topology("v5e:3x7")
    config = dataclasses.replace(make_config(), mesh=MeshSection(data=3))
    with pytest.raises(sharding.ShardingError, match="do not divide the 4 devices"):
        recipes.plan(config, tmp_path, topology="v5e:2x2")
    assert len(open_topology("v5e:2x2").devices) == 4
