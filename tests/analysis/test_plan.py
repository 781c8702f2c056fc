"""Plans: what is read of a compiled step, and what is said of it."""

import dataclasses
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convbert_jax
from convbert_jax.analysis import arithmetic_plan, planned
from convbert_jax.analysis.tpu import chips, plan, plan_text
from convbert_jax.analysis.tpu.chips import CHIPS, count_chips, list_slices
from convbert_jax.analysis.tpu.collectives import BETWEEN_SLICES, Collective
from convbert_jax.analysis.tpu.topology import Topology, expand_name, open_topology
from convbert_jax.config import ConfigError

GIB = 2**30
MEMORY = plan.Memory(1 * GIB, 2 * GIB, GIB // 4, 8 * GIB, GIB // 4, 16 * GIB)
OPERATIONS = plan.Operations(
    {plan.PRODUCTS: 300e6, plan.KERNELS: 20e6, plan.OTHER: 100e6},
    {"attention": 300e6, plan.REST: 120e6},
    ((60e6, 12, "fusion.7", "jit(step)/mul"),),
    {"sort": 2},
)
REDUCED = Collective("all-reduce", "data", 12, 10_000_000, 16, False, "jit(step)/reduce")
GATHERED = Collective("all-gather", "fsdp", 12, 10_000_000, 16, True, "jit(step)/gather")


def make_step(**changed) -> plan.Step:
    step = plan.Step(MEMORY, OPERATIONS, (REDUCED, GATHERED), chips.CHIPS["v5e"])
    return dataclasses.replace(step, **changed)


def make_plan(step=None, **changed) -> plan.Plan:
    config = convbert_jax.load_config("base")
    topology = Topology("v5e:4x4", chips.CHIPS["v5e"], 16, range(16))
    axes = {"data": 16, "fsdp": 1, "tensor": 1}
    made = plan.Plan(
        config, topology, axes, 4096, step or make_step(), 7 * GIB, 524_288, 3.04e14
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def test_a_teacher_lies_on_a_device_whatever_the_batch():
    """It counted as a part of the batch, which a search for the largest one takes to grow."""
    memory = dataclasses.replace(MEMORY, teacher=GIB)
    taught = make_plan(make_step(memory=memory))
    alone = make_plan()
    assert taught.used - alone.used == taught.fixed - alone.fixed == GIB
    assert "teacher's parameters     1.0 GiB" in plan_text.describe(taught, None, (), None)
    assert "teacher" not in plan_text.describe(alone, None, (), None)


def test_a_step_takes_what_its_parts_take():
    chip = chips.CHIPS["v5e"]
    alone = make_step(collectives=()).seconds
    clock = 197e12 / (4 * 128 * 128 * 2)
    assert alone[1] == pytest.approx(420e6 / clock)
    assert alone[0] == pytest.approx((320e6 + 100e6 / chip.memory_pessimism) / clock)
    assert 2 < chip.memory_pessimism < 3
    waited, hidden = (make_step(collectives=(each,)).seconds for each in (REDUCED, GATHERED))
    sent = 12 * 2 * 10e6 * 15 / 16
    assert waited[0] - alone[0] == pytest.approx(sent / 200e9)  # all four links, one way
    assert waited[1] - alone[1] == pytest.approx(sent / 100e9)  # the two of one axis
    assert hidden[0] == alone[0]
    assert hidden[1] - alone[1] == pytest.approx(sent / 2 / 100e9)


def test_what_leaves_a_slice_goes_over_another_network():
    between = Collective("all-reduce", BETWEEN_SLICES, 1, 10_000_000, 2, True, "")
    step, alone = make_step(collectives=(REDUCED, between)), make_step(collectives=(REDUCED,))
    assert step.sent_between_slices == 10e6
    assert step.seconds[0] == alone.seconds[0]
    assert step.seconds[1] - alone.seconds[1] == pytest.approx(10e6 / (6.4e12 / 8 / 256))
    unknown = dataclasses.replace(step, chip=chips.CHIPS["v4"])
    assert unknown.seconds == dataclasses.replace(alone, chip=chips.CHIPS["v4"]).seconds
    topology = dataclasses.replace(make_plan().topology, chips=32, slices=2)
    text = plan_text.describe(make_plan(unknown, topology=topology), None, (), None)
    assert "32 chips in 2 slices" in text
    assert "10.0 MB of it between slices, whose network is not known" in text
    assert "all-reduce over slices" in text


def test_memory_adds_up_in_what_is_said():
    text = plan_text.describe(make_plan(), None, (), 1.5)
    assert "11.50 of 16.00 GiB" in text
    assert MEMORY.left == 4.5 * GIB
    low, high = make_step().seconds
    hours = [seconds * 1_000_000 / 3600 * 16 for seconds in (low, high)]
    assert f"{hours[0]:,.0f} to {hours[1]:,.0f} chip-hours" in text
    assert f"{1.5 * hours[0]:,.0f} to {1.5 * hours[1]:,.0f} at 1.5 each" in text
    assert "all-reduce over data" in text
    assert "cores wait" in text
    assert "2 sort" in text


def test_of_a_long_source_the_end_is_told_and_that_it_is_one():
    source = "jit(step)/" + 6 * "jvp(loss)/" + "feed_forward/dot_general"
    told = plan_text._end_of(source)
    assert told.startswith("…")
    assert source.endswith(told[1:])
    assert len(told) == 60


def test_what_does_not_fit_says_what_helps():
    short = make_plan(plan.Shortage(24.5 * GIB, 15.75 * GIB, 3 * GIB, 6 * GIB))
    search = planned.Largest(
        None, (planned.Trial(short, None),), 4096, 24.5 * GIB, True, 1.0, False
    )
    text = plan_text.describe(short, search, (), None)
    assert "24.5 GiB and has 15.75" in text
    assert (
        "activations that wait for the backward pass 7.0 GiB, moments of adamw 6.0 GiB, "
        "parameters 3.0 GiB, gradients 3.0 GiB" in text
    )
    assert "--config.mesh.fsdp" in text
    assert "no batch was found" in text
    assert "beyond: 4,096 rows do not fit, compiled" in text
    assert "PREDICTED" not in text
    assert "may keep less" not in text
    assert plan_text.outcome(short) == "needs 24.50 of 15.75 GiB, and does not fit"


def test_a_search_says_what_was_compiled_and_what_predicted():
    first = make_plan(rows=1024)
    memory = dataclasses.replace(MEMORY, temporaries=12 * GIB)
    dear = dataclasses.replace(
        OPERATIONS, groups={name: 10 * n for name, n in OPERATIONS.groups.items()}
    )
    most = make_plan(make_step(memory=memory, operations=dear), rows=2048)
    trials = planned.Trial(first, None), planned.Trial(most, 15.8 * GIB)
    search = planned.Largest(most, trials, 2176, 16.1 * GIB, False, 4.5, True)
    text = plan_text.describe(first, search, (), None)
    assert "largest batch found: --config.train.batch_size=2048, 15.50 of 16.00 GiB" in text
    assert text.count(plan_text.outcome(most)) == 1  # what the log says once it is compiled
    assert "compiled: 1,024 rows, 11.5 GiB\n" in text
    assert "compiled: 2,048 rows, 15.5 GiB; predicted from those before: 15.8 GiB\n" in text
    assert "beyond: 2,176 rows would take 16.1 GiB, PREDICTED, not compiled" in text
    assert "may keep less and compute more" in text
    assert "ended there: a row costs 4.50 times a row of the cheapest" in text
    numbers = json.loads(json.dumps(planned.numbers_of_all(first, search, (), plan_text.to_json)))
    assert numbers["largest_batch"]["rows"] == 2048
    assert numbers["search"]["does_not_fit"]["by"] == "prediction"
    assert [trial["predicted"] for trial in numbers["search"]["trials"]] == [None, 15.8 * GIB]


def test_the_fastest_that_fits_is_recommended():
    slow = make_plan(axes={"data": 4, "fsdp": 4, "tensor": 1})
    operations = dataclasses.replace(
        OPERATIONS, groups={name: n / 2 for name, n in OPERATIONS.groups.items()}
    )
    fast = make_plan(make_step(operations=operations), axes={"data": 1, "fsdp": 16, "tensor": 1})
    short = make_plan(plan.Shortage(17e9, 16e9, 1, 2), axes={"data": 2, "fsdp": 8, "tensor": 1})
    text = plan_text.describe(slow, None, (short, fast), None)
    title, *rows = text.splitlines()[-5:-1]
    assert {row.index("iB") + 2 for row in rows} == {title.index("memory") + 6}
    last = text.splitlines()[-1]
    assert "--config.mesh.data=1 --config.mesh.fsdp=16" in last
    assert text.count("does not fit") == 1


@pytest.mark.parametrize("step", [make_step(), plan.Shortage(2.0, 1.0, 1, 2)])
def test_numbers_are_json(step):
    numbers = json.loads(json.dumps(plan_text.to_json(make_plan(step))))
    assert numbers["fits"] == isinstance(step, plan.Step)
    if numbers["fits"]:
        assert numbers["memory"]["used"] == MEMORY.used
        assert [c["sent_bytes"] for c in numbers["collectives"]] == [225e6, 112.5e6]
        assert numbers["seconds_of_a_step"] == list(step.seconds)


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("jit(step)/jvp(loss)/generator/while/body/mixer/attention/dot_general", "attention"),
        ("jit(step)/transpose(jvp(loss))/mixer/convolution/mul", "convolution branch"),
        (
            "jit(step)/transpose(jvp(loss/mixer))/abi,io->abo/dot_general",
            "projections of the mixer",
        ),
        ("jit(step)/jvp(loss)/heads/convolution_like/add", "embeddings and heads"),
        ("jit(step)/update/mul", "update"),
        (
            "jit(step)/jvp(loss)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
            "stacks of the scan over layers",
        ),
        ("jit(step)/jvp(loss)/while/body/closed_call/feed_forward/add", "feed-forward"),
        ("jit(step)/my_attention/add", plan.REST),
        ("", plan.REST),
    ],
)
def test_the_innermost_scope_says_which_part(source, part):
    assert plan._part(source) == part


def test_parts_and_what_is_waited_for_are_in_text_and_numbers():
    made, chip = make_plan(), chips.CHIPS["v5e"]
    waited = REDUCED.sent_bytes / 200e9 * chip.clock  # all four links, one way
    assert plan_text.to_json(made)["cycles_by_part"] == {
        "attention": 300e6, plan.REST: 120e6, plan.WAITING: pytest.approx(waited),
    }  # fmt: skip
    text = plan_text.describe(made, None, (), None)
    assert re.search(rf"{plan.WAITING} +{waited / 1e6:.2f}", text)


def test_numbers_say_what_the_run_takes():
    made = make_plan()
    steps, (best, worst) = made.config.train.steps, made.seconds
    numbers = json.loads(json.dumps(plan_text.to_json(made, price=1.5)))
    assert numbers["tokens_per_second"] == [524_288 / best, 524_288 / worst]
    assert numbers["hours"] == pytest.approx([best * steps / 3600, worst * steps / 3600])
    assert numbers["chip_hours"] == pytest.approx([16 * hours for hours in numbers["hours"]])
    assert numbers["price"] == pytest.approx([1.5 * hours for hours in numbers["chip_hours"]])
    assert "at worst" in numbers["assumptions"]
    assert plan_text.to_json(made)["price"] is None


@pytest.mark.parametrize(
    ("message", "bytes_"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total "
            "memory required for HLO temporaries (384.00G) exceeds available HBM (15.75G).",
            (384 * GIB, 15.75 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.18G of 15.75G hbm.",
            (20.18 * GIB, 15.75 * GIB),
        ),
        ("RESOURCE_EXHAUSTED: too many files", None),
    ],
)
def test_the_compilers_word_for_too_much_memory(message, bytes_):
    assert plan.bytes_needed(RuntimeError(message)) == bytes_


@pytest.mark.parametrize(
    "name",
    ["", "v5e", "v5e:", "v5e:4xx4", "h100:8", "v9:2x2", "tpu:v5e:2x2", "v5e:4X4", "v5e:0x0",
     "v5p:2x0x2"],  # a side of nothing would end the whole process in the compiler
)  # fmt: skip
def test_a_name_that_is_no_slice_is_refused(name):
    with pytest.raises(ConfigError, match=r"v5e:4x4"):
        open_topology(name)


@pytest.mark.parametrize(
    ("name", "expanded"),
    [
        ("v5e-1", "v5e:1x1"),
        ("v5e-8", "v5e:2x4"),
        ("v5e-16", "v5e:4x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("2xv5e-256", "2xv5e:16x16"),
        ("v6e-32", "v6e:4x8"),
        ("v4-8", "v4:2x2x1"),  # cores, two a chip
        ("v4-512", "v4:4x8x8"),  # not 4x4x16
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-384", "v5p:4x4x12"),
        ("tpu7x-8", "tpu7x:2x2x1"),
        ("v5e:4x4", "v5e:4x4"),
        ("gpu-8", "gpu-8"),
    ],
)
def test_names_that_count_chips_or_cores(name, expanded):
    assert expand_name(name) == expanded


@pytest.mark.parametrize("name", ["v5e-12", "v5e-0", "v5e-512", "v4-4", "v5p-20", "3xv6e-3"])
def test_a_number_of_chips_that_no_slice_has_names_those_that_exist(name):
    with pytest.raises(ConfigError) as error:
        expand_name(name)
    kind = name.removeprefix("3x").partition("-")[0]
    for known, expanded in list_slices(kind).items():
        assert known in str(error.value)
        assert expand_name(known) == expanded
    assert f"--topology={name}" in str(error.value)


def test_slices_have_the_chips_that_their_names_count():
    for kind in CHIPS:
        cores = 2 if kind in ("v4", "v5p", "tpu7x") else 1
        for name, expanded in list_slices(kind).items():
            assert int(name.partition("-")[2]) == cores * count_chips(expanded)


@pytest.mark.parametrize(
    "name", ["gpu:", "gpu:h100x0", "gpu:h900x8", "gpu:h100x-1", "gpu:h100x8x2"]
)
def test_a_name_that_is_no_gpu_is_refused(name):
    with pytest.raises(ConfigError, match="names no GPUs"):
        arithmetic_plan.read_gpus(name)


def test_gpus_by_name():
    one = arithmetic_plan.read_gpus("gpu:l4")
    assert (one.kind, one.count, one.bytes, one.peak) == ("L4", 1, 24e9, 121e12)
    assert one.bandwidth == 300e9
    assert arithmetic_plan.read_gpus("gpu:h100x16").count == 16


def test_the_speed_of_products_is_that_of_this_machine():
    here = arithmetic_plan.this_cpu(256, 128, 512)
    x, y = np.ones((256, 128), np.float32), np.ones((128, 512), np.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(x, y))
    begin = time.perf_counter()
    for _ in range(100):
        jax.block_until_ready(multiply(x, y))
    mean = (time.perf_counter() - begin) / 100
    # The best of many, so at least as fast as their mean, and no faster than any CPU.
    assert 2 * 256 * 128 * 512 / mean * 0.5 < here.peak < 1e14
    assert here.bytes > 2**28


@pytest.mark.parametrize(("unit", "least"), [(True, 0.1), (False, 0.2)])
def test_a_matrix_unit_waits_for_the_rest_of_a_step(unit, least, monkeypatch):
    monkeypatch.setattr(arithmetic_plan.processor, "multiplies_bfloat16", lambda: unit)
    monkeypatch.setattr(arithmetic_plan, "_measure_products", lambda *_: 1e12)
    here = arithmetic_plan.this_cpu(256, 128, 512, jnp.bfloat16)
    assert here.reached[0] == least
    assert "1,000 GFLOP/s that this machine reached just now in bfloat16 products" in here.basis
    assert arithmetic_plan.this_cpu(256, 128, 512).reached[0] == 0.2
