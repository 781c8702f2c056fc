"""The candidates of a plan: other batch sizes, meshes and `config.model.remat`."""

import dataclasses

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from convbert_jax.analysis import plans, tpu_plan
from convbert_jax.analysis.tpu_devices import open_topology
from convbert_jax.recipes import plan_search, planning
from convbert_jax.training import partitioning
from tests.analysis.test_plan import make_plan, make_step
from tests.running import needs_libtpu
from tests.runs import make_config

CAPACITY = 15.75  # GiB per v5e chip


def axes_of(**sizes) -> dict[str, int]:
    return dict.fromkeys(partitioning.AXES, 1) | sizes


def gib(*numbers: float) -> list[int]:
    return [int(number * 2**30) for number in numbers]


def work(cycles: float) -> dict:
    """Arguments of make_step for a step of `cycles` cycles on one device."""
    operations = tpu_plan.Operations(
        {tpu_plan.PRODUCTS: cycles, tpu_plan.KERNELS: 0.0, tpu_plan.OTHER: 0.0}, {}, (), {}
    )
    return {"operations": operations, "collectives": ()}


class Planner:
    """Plans with `step_of(rows)` and records the batch sizes in `tried`."""

    def __init__(self, step_of, **of_plan):
        self.step_of, self.of_plan, self.tried = step_of, of_plan, []

    def __call__(self, config):
        rows = config.train.batch_size
        self.tried.append(rows)
        of_plan = {"axes": axes_of(data=8)} | {
            name: value(rows) if callable(value) else value for name, value in self.of_plan.items()
        }
        return make_plan(self.step_of(rows), config=config, rows=rows, **of_plan)

    def search(self, rows, **fields):
        config = make_config(train__batch_size=rows, **fields)
        return plan_search.find_largest(self(config), self)


@settings(max_examples=30)
@example(197, 49, 49, 1)  # nearly full at the first batch; the predicted larger one also fits
@given(
    st.integers(0, 900), st.integers(1, 60), st.integers(1, 64), st.sampled_from((1, 2, 4)),
)  # fmt: skip
def test_the_search_ends_at_the_largest_batch(fixed, slope, batch, accumulation):
    """Memory grows linearly; every batch that is tried can be trained."""
    capacity = 10_000

    def step_of(rows):
        used = fixed + slope * rows / accumulation
        if used > capacity:
            return tpu_plan.Shortage(used, capacity, 0, 0)
        return make_step(memory=tpu_plan.Memory(0, 0, 0, int(used), 0, capacity))

    # The compiler uses less than the traced activations.
    planner = Planner(
        step_of, axes=axes_of(data=4), kept=lambda rows: 1.3 * slope * rows / accumulation
    )
    unit = 4 * accumulation * (8 if batch % 8 == 0 else 1)
    most = int((capacity - fixed) / slope * accumulation) // unit * unit  # largest batch that fits
    assume(0 < most < 2**20)
    search = planner.search(4 * accumulation * batch, train__accumulation=accumulation)
    tried, found = planner.tried, search.plan
    assert all(rows % unit == 0 for rows in tried)
    assert len(tried) <= 1 + plan_search._SEARCHES
    assert [trial.plan.rows for trial in search.trials] == tried
    assert found is not None
    # A planned batch is an upper bound; a single plan does not show how memory grows.
    assert search.next_rows > (most if search.next_planned else found.rows)
    assert search.next_planned == (search.next_rows in tried)
    assert found.fits
    enough = [fixed + slope * rows / accumulation >= 0.97 * capacity for rows in tried]
    fits = [rows <= most for rows in tried]
    assert found.rows >= most - unit or found.used >= 0.97 * capacity
    # A plan takes minutes, so the search ends at one that nearly fills the memory.
    assert not any(a and b for a, b in zip(enough[:-1], fits[:-1], strict=True))


def test_a_compiler_that_saves_memory_does_not_mislead_the_search():
    """As `base` on v5e:2x4; extrapolating from 1,792 and 1,920 rows would predict 9,216."""

    def step_of(rows):
        if rows > 2_000:
            return tpu_plan.Shortage(*gib(15.8, CAPACITY), 0, 0)
        (used, capacity) = gib(min(1.4 + 8.6 / 1024 * rows, 14.7 + rows / 80_000), CAPACITY)
        return make_step(memory=tpu_plan.Memory(0, 0, 0, used, 0, capacity))

    planner = Planner(step_of)
    assert 1_792 <= planner.search(1024).plan.rows <= 2_000
    assert max(planner.tried) < 2_500


def test_the_search_ends_where_rows_become_expensive():
    """As `small` on v5e:2x4: the predicted batch takes 85% of the memory due to recomputation.

    The compiler computes part of the step twice to save memory.
    """

    def step_of(rows):
        squeezed = rows > 5_600
        kept, used, capacity = gib(0.45, 12.93 if squeezed else 2.31 * rows / 1024, CAPACITY)
        memory = tpu_plan.Memory(0, kept, 0, used, 0, capacity)
        return make_step(memory=memory, **work(rows * (536e3 if squeezed else 395e3)))

    planner = Planner(step_of)
    search = planner.search(1024)
    assert planner.tried == [1024, search.plan.rows]
    first, second = search.trials
    assert first.predicted is None
    # Predicted from the memory that grows with rows; parameters are constant.
    assert second.predicted == pytest.approx(CAPACITY * 2**30, rel=0.01)
    assert search.row_cost == pytest.approx(536 / 395)
    assert search.gave_up
    assert search.next_rows > search.plan.rows
    assert not search.next_planned


def test_a_batch_that_does_not_fit_leads_to_one_that_does():
    """Predicts from traced activations; the compiler reports only that it ran out of memory."""

    def step_of(rows):
        if rows > 2_000:
            return tpu_plan.Shortage(8_400, 8_300, 100, 200)
        return make_step(memory=tpu_plan.Memory(100, 200, 0, 4 * rows, 0, 8_300))

    planner = Planner(step_of, kept=lambda rows: 5 * rows)
    search = planner.search(8192)
    assert planner.tried[:2] == [8192, 1600]  # (8,300 - 300) / 5
    assert search.plan.rows >= 1_900
    assert search.next_rows in planner.tried
    assert search.next_planned


def test_other_meshes_keep_what_a_run_needs():
    def sizes(*axes):
        found = plan_search.other_meshes(dict(zip(partitioning.AXES, axes, strict=True)))
        return [dataclasses.astuple(mesh) for mesh in found]

    assert sizes(16, 1, 1, 1) == [
        (4, 4, 1, 1), (2, 8, 1, 1), (1, 16, 1, 1), (8, 1, 2, 1), (8, 1, 1, 2),
    ]  # fmt: skip
    assert sizes(2, 1, 1, 8) == [(1, 2, 1, 8), (1, 1, 2, 8), (4, 1, 1, 4), (1, 1, 1, 16)]


def test_what_is_computed_again_is_compared_on_the_best_mesh():
    """The fastest candidate that fits is recommended; an invalid mesh is omitted."""

    def fake(config):
        m = config.mesh
        axes = dict(zip(partitioning.AXES, dataclasses.astuple(m), strict=True))
        if m.tensor > 1:
            raise partitioning.ShardingError("it does not divide the heads")
        fits = m.fsdp > 1
        memory = tpu_plan.Memory(0, 0, 0, 90, 0, 100)
        step = make_step(memory=memory) if fits else tpu_plan.Shortage(200, 100, 0, 0)
        return make_plan(step, config=config, axes=axes)

    first = fake(make_config(mesh__data=16))
    compared = plan_search.compare(first, fake)
    again = [each for each in compared if each.config.model.remat != "none"]
    assert [each.config.model.remat for each in again] == ["dots", "full"]
    assert {each.axes["fsdp"] for each in again} == {4}
    assert all(each.axes["tensor"] == 1 for each in compared)
    assert plans.recommend([first, *compared]).axes["fsdp"] == 4


def test_fewer_rows_at_once_are_compared_as_long_as_they_are_better():
    """As `base` on one v5e with 256 rows: four micro-batches are the fastest."""
    tried = []

    def fake(config):
        rows, accumulation = config.train.batch_size, config.train.accumulation
        tried.append((accumulation, config.model.remat))
        cycles = {1: 413e6, 2: 336e6, 4: 322e6, 8: 330e6}[accumulation]
        cycles *= 1.0 if config.model.remat == "none" else 1.3
        step = make_step(**work(cycles))
        return make_plan(step, config=config, rows=rows, axes=axes_of(data=1))

    first = fake(make_config(train__batch_size=256))
    planned = [first, *plan_search.compare(first, fake)]
    assert tried == [*((n, "none") for n in (1, 2, 4, 8)), (4, "dots"), (4, "full")]
    best = plans.recommend(planned)
    assert best.config.train.accumulation == 4
    assert plans.flags_of(best).endswith(" --config.model.remat=none --config.train.accumulation=4")
    tried.clear()
    plan_search.compare(fake(make_config(train__batch_size=24)), fake)  # 12 rows do not divide
    assert {accumulation for accumulation, _ in tried} == {1}


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
def test_the_largest_batch_of_a_slice_is_compiled(monkeypatch):
    """Compiles once more, for a chip limited to 4 GiB.

    Near the real memory limit a compilation takes many minutes.
    """
    monkeypatch.setattr(plan_search, "_SEARCHES", 1)
    config = make_config(
        recipe="masked_lm", train__batch_size=2**14, model__hidden_size=128,
        model__embedding_size=128, compute_dtype="bfloat16",
    )  # fmt: skip
    topology = open_topology("v5e:2x2")
    chip = dataclasses.replace(topology.chip, hbm_bytes=4.0 * 2**30)
    small = dataclasses.replace(topology, chip=chip)
    numbers = planning.plan_slice(
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
