"""Other batches, meshes and `config.model.remat`: what is tried, and where a search ends."""

import dataclasses

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from convbert_jax.analysis import planned
from convbert_jax.analysis.tpu import plan as tpu_plan
from convbert_jax.analysis.tpu.topology import open_topology
from convbert_jax.recipes.planning import candidates, tpu_slice
from convbert_jax.training import sharding
from tests.analysis.test_plan import make_plan, make_step
from tests.running import needs_libtpu
from tests.runs import make_config


@settings(max_examples=30)
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


def test_the_search_ends_where_rows_become_expensive():
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


def test_fewer_rows_at_once_are_compared_as_long_as_they_are_better():
    """As `base` on one v5e with 256 rows: four micro-batches are the fastest."""
    tried = []

    def fake(config):
        rows, accumulation = config.train.batch_size, config.train.accumulation
        tried.append((accumulation, config.model.remat))
        cycles = {1: 413e6, 2: 336e6, 4: 322e6, 8: 330e6}[accumulation]
        cycles *= 1.0 if config.model.remat == "none" else 1.3
        operations = tpu_plan.Operations(
            {tpu_plan.PRODUCTS: cycles, tpu_plan.KERNELS: 0.0, tpu_plan.OTHER: 0.0}, {}, (), {}
        )
        step = make_step(operations=operations, collectives=())
        axes = {"data": 1, "fsdp": 1, "tensor": 1, "sequence": 1}
        return make_plan(step, config=config, rows=rows, axes=axes)

    first = fake(make_config(train__batch_size=256))
    plans = [first, *candidates.compare(first, fake)]
    assert tried == [*((n, "none") for n in (1, 2, 4, 8)), (4, "dots"), (4, "full")]
    best = planned.recommend(plans)
    assert best.config.train.accumulation == 4
    assert planned.flags_of(best).endswith(
        " --config.model.remat=none --config.train.accumulation=4"
    )
    tried.clear()
    candidates.compare(fake(make_config(train__batch_size=24)), fake)  # halves of 24 are not 8s
    assert {accumulation for accumulation, _ in tried} == {1}


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
    assert largest["rows"] % (4 * 128) == 0
    assert largest["memory"]["used"] == second["used"]
    assert numbers["search"]["does_not_fit"]["rows"] > second["rows"]
