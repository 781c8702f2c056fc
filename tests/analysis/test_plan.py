"""Plans: values read from a compiled step, and their text and JSON."""

import dataclasses
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convbert_jax
from convbert_jax.analysis import plans, tpu_devices, tpu_plan
from convbert_jax.analysis.hlo import BETWEEN_SLICES, Collective
from convbert_jax.analysis.tpu_devices import (
    CHIPS,
    Topology,
    count_chips,
    expand_name,
    list_slices,
    open_topology,
)
from convbert_jax.config import ConfigError
from tests.refusals import refused

GIB = 2**30
MEMORY = tpu_plan.Memory(1 * GIB, 2 * GIB, GIB // 4, 8 * GIB, GIB // 4, 16 * GIB)
OPERATIONS = tpu_plan.Operations(
    {tpu_plan.PRODUCTS: 300e6, tpu_plan.KERNELS: 20e6, tpu_plan.OTHER: 100e6},
    {"attention": 300e6, tpu_plan.REST: 120e6},
    ((60e6, 12, "fusion.7", "jit(step)/mul"),),
    {"sort": 2},
)
REDUCED = Collective("all-reduce", "data", 12, 10_000_000, 16, False, "jit(step)/reduce")
GATHERED = Collective("all-gather", "fsdp", 12, 10_000_000, 16, True, "jit(step)/gather")


def make_step(**changed) -> tpu_plan.Step:
    step = tpu_plan.Step(MEMORY, OPERATIONS, (REDUCED, GATHERED), tpu_devices.CHIPS["v5e"])
    return dataclasses.replace(step, **changed)


def make_plan(step=None, **changed) -> tpu_plan.Plan:
    config = convbert_jax.load_config("base")
    topology = Topology("v5e:4x4", tpu_devices.CHIPS["v5e"], 16, range(16))
    axes = {"data": 16, "fsdp": 1, "tensor": 1}
    made = tpu_plan.Plan(
        config, topology, axes, 4096, step or make_step(), 7 * GIB, 524_288, 3.04e14
    )  # fmt: skip
    return dataclasses.replace(made, **changed)


def scaled(factor: float) -> tpu_plan.Operations:
    groups = {name: factor * n for name, n in OPERATIONS.groups.items()}
    return dataclasses.replace(OPERATIONS, groups=groups)


def describe(made, search=None, others=(), price=None) -> str:
    return tpu_plan.describe(made, search, others, price)


def test_the_time_of_a_step():
    chip = tpu_devices.CHIPS["v5e"]
    alone = make_step(collectives=()).seconds
    clock = 197e12 / (4 * 128 * 128 * 2)
    assert alone[1] == pytest.approx(420e6 / clock)
    assert alone[0] == pytest.approx((320e6 + 100e6 / chip.memory_pessimism) / clock)
    assert 2 < chip.memory_pessimism < 3
    waited, hidden = (make_step(collectives=(each,)).seconds for each in (REDUCED, GATHERED))
    sent = 12 * 2 * 10e6 * 15 / 16
    assert waited[0] - alone[0] == pytest.approx(sent / 200e9)  # all four links, one way
    assert waited[1] - alone[1] == pytest.approx(sent / 100e9)  # two links of one axis
    assert hidden[0] == alone[0]
    assert hidden[1] - alone[1] == pytest.approx(sent / 2 / 100e9)


def test_traffic_between_slices():
    between = Collective("all-reduce", BETWEEN_SLICES, 1, 10_000_000, 2, True, "")
    step, alone = make_step(collectives=(REDUCED, between)), make_step(collectives=(REDUCED,))
    assert step.sent_between_slices == 10e6
    assert step.seconds[0] == alone.seconds[0]
    assert step.seconds[1] - alone.seconds[1] == pytest.approx(10e6 / (6.4e12 / 8 / 256))
    v4 = dataclasses.replace(step, chip=tpu_devices.CHIPS["v4"])  # unknown network
    assert v4.seconds == dataclasses.replace(alone, chip=tpu_devices.CHIPS["v4"]).seconds
    topology = dataclasses.replace(make_plan().topology, chips=32, slices=2)
    text = describe(make_plan(v4, topology=topology))
    assert "32 chips in 2 slices" in text
    assert "10.0 MB" in text


def test_a_teacher_does_not_grow_with_the_batch():
    taught = make_plan(make_step(memory=dataclasses.replace(MEMORY, teacher=GIB)))
    alone = make_plan()
    assert taught.used - alone.used == taught.fixed - alone.fixed == GIB
    assert re.search(r"^.*teacher.* 1\.0 GiB", describe(taught), re.MULTILINE)
    assert "teacher" not in describe(alone)


def test_text_and_numbers_of_a_plan():
    made, text = make_plan(), describe(make_plan(), price=1.5)
    numbers = json.loads(json.dumps(tpu_plan.to_json(made, price=1.5)))
    assert numbers["fits"]
    assert numbers["memory"]["used"] == MEMORY.used
    assert MEMORY.left == 4.5 * GIB
    assert "11.50 of 16.00 GiB" in text
    assert [c["sent_bytes"] for c in numbers["collectives"]] == [225e6, 112.5e6]
    assert numbers["seconds_of_a_step"] == list(make_step().seconds)
    best, worst = made.seconds
    steps = made.config.train.steps
    assert numbers["tokens_per_second"] == [524_288 / best, 524_288 / worst]
    assert numbers["hours"] == pytest.approx([best * steps / 3600, worst * steps / 3600])
    assert numbers["chip_hours"] == pytest.approx([16 * hours for hours in numbers["hours"]])
    assert numbers["price"] == pytest.approx([1.5 * hours for hours in numbers["chip_hours"]])
    assert tpu_plan.to_json(made)["price"] is None
    for name in ("chip_hours", "price"):
        assert "{:,.0f} to {:,.0f}".format(*numbers[name]) in text
    waited = REDUCED.sent_bytes / 200e9 * tpu_devices.CHIPS["v5e"].clock  # all four links, one way
    parts = {"attention": 300e6, tpu_plan.REST: 120e6, tpu_plan.WAITING: pytest.approx(waited)}
    assert numbers["cycles_by_part"] == parts
    assert re.search(rf"{tpu_plan.WAITING} +{waited / 1e6:.2f}", text)
    assert "all-reduce over data" in text
    assert "2 sort" in text
    source = "jit(step)/" + 6 * "jvp(loss)/" + "feed_forward/dot_general"
    end = tpu_plan._end_of(source)
    assert (end[0], len(end)) == ("…", 60)
    assert source.endswith(end[1:])


def test_a_plan_that_does_not_fit():
    short = make_plan(tpu_plan.Shortage(24.5 * GIB, 15.75 * GIB, 3 * GIB, 6 * GIB))
    search = plans.Largest(None, (plans.Trial(short, None),), 4096, 24.5 * GIB, True, 1.0, False)
    text = describe(short, search)
    assert "24.5 GiB and has 15.75" in text
    # activations, moments, parameters, gradients
    assert re.findall(r"(\d\.\d) GiB[,.;]", text)[:4] == ["7.0", "6.0", "3.0", "3.0"]
    assert "--config.mesh.fsdp" in text
    assert "4,096 rows" in text
    assert "PREDICTED" not in text
    assert re.findall(r"\d+\.\d+", tpu_plan.outcome(short)) == ["24.50", "15.75"]
    assert not json.loads(json.dumps(tpu_plan.to_json(short)))["fits"]


def test_a_search_for_the_largest_batch():
    first = make_plan(rows=1024)
    memory = dataclasses.replace(MEMORY, temporaries=12 * GIB)
    most = make_plan(make_step(memory=memory, operations=scaled(10)), rows=2048)
    trials = plans.Trial(first, None), plans.Trial(most, 15.8 * GIB)
    search = plans.Largest(most, trials, 2176, 16.1 * GIB, False, 4.5, True)
    text = describe(first, search)
    assert "--config.train.batch_size=2048" in text
    assert text.count(tpu_plan.outcome(most)) == 1
    for rows, *memory in (
        ("1,024", "11.5 GiB"),
        ("2,048", "15.5 GiB", "15.8 GiB"),
        ("2,176", "16.1 GiB"),
    ):
        (line,) = (line for line in text.splitlines() if f"{rows} rows" in line and "GiB" in line)
        assert re.findall(r"[\d.]+ GiB", line) == memory
    assert "4.50" in text  # cost per row next to the cheapest
    assert "PREDICTED" in text
    numbers = json.loads(json.dumps(plans.numbers_of_all(first, search, (), tpu_plan.to_json)))
    assert numbers["largest_batch"]["rows"] == 2048
    assert numbers["search"]["does_not_fit"]["by"] == "prediction"
    assert [trial["predicted"] for trial in numbers["search"]["trials"]] == [None, 15.8 * GIB]


def test_the_fastest_mesh_that_fits_is_recommended():
    slow = make_plan(axes={"data": 4, "fsdp": 4, "tensor": 1})
    fast = make_plan(make_step(operations=scaled(0.5)), axes={"data": 1, "fsdp": 16, "tensor": 1})
    short = make_plan(tpu_plan.Shortage(17e9, 16e9, 1, 2), axes={"data": 2, "fsdp": 8, "tensor": 1})
    *_, title, first, second, third, last = describe(slow, None, (short, fast)).splitlines()
    for row in (first, second, third):
        assert row.index("iB") + 2 == title.index("memory") + 6
    assert "--config.mesh.data=1 --config.mesh.fsdp=16" in last


def test_the_innermost_scope_is_the_part():
    parts = {
        "jit(step)/jvp(loss)/generator/while/body/mixer/attention/dot_general": "attention",
        "jit(step)/transpose(jvp(loss))/mixer/convolution/mul": "convolution branch",
        "jit(step)/transpose(jvp(loss/mixer))/abi,io->abo/dot_general": "projections of the mixer",
        "jit(step)/jvp(loss)/heads/convolution_like/add": "embeddings and heads",
        "jit(step)/update/mul": "update",
        "jit(step)/jvp(loss)/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice": (
            "stacks of the scan over layers"
        ),
        "jit(step)/jvp(loss)/while/body/closed_call/feed_forward/add": "feed-forward",
        "jit(step)/my_attention/add": tpu_plan.REST,
        "": tpu_plan.REST,
    }
    assert {source: tpu_plan._part(source) for source in parts} == parts


def test_memory_is_read_from_errors_of_the_compiler():
    start = "RESOURCE_EXHAUSTED: "
    messages = {
        f"{start}E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for "
        "HLO temporaries (384.00G) exceeds available HBM (15.75G).": (384 * GIB, 15.75 * GIB),
        f"{start}Ran out of memory in memory space hbm. Used 20.18G of 15.75G hbm.": (
            20.18 * GIB,
            15.75 * GIB,
        ),
        f"{start}too many files": None,
    }
    found = {message: tpu_plan.bytes_needed(RuntimeError(message)) for message in messages}
    assert found == messages


@pytest.mark.parametrize(
    "name",
    ["", "v5e", "v5e:", "v5e:4xx4", "h100:8", "v9:2x2", "tpu:v5e:2x2", "v5e:4X4", "v5e:0x0",
     "v5p:2x0x2"],  # the compiler would abort on a side of 0
)  # fmt: skip
def test_a_name_that_is_not_a_slice_is_refused(name):
    with refused(ConfigError, "v5e:4x4", field="--topology", value=name):
        open_topology(name)


def test_names_that_count_chips_or_cores():
    expanded = {
        **{"v5e-1": "v5e:1x1", "v5e-8": "v5e:2x4", "v5litepod-16": "v5e:4x4", "v6e-32": "v6e:4x8"},
        **{"2xv5e-256": "2xv5e:16x16", "v4-8": "v4:2x2x1", "v4-512": "v4:4x8x8"},
        **{"v5p-128": "v5p:4x4x4", "v5p-384": "v5p:4x4x12", "tpu7x-8": "tpu7x:2x2x1"},
        **{"v5e:4x4": "v5e:4x4", "gpu-8": "gpu-8"},
    }
    assert {name: expand_name(name) for name in expanded} == expanded
    for kind in CHIPS:
        cores = 2 if kind in ("v4", "v5p", "tpu7x") else 1
        for name, slices in list_slices(kind).items():
            assert expand_name(name) == slices
            assert int(name.partition("-")[2]) == cores * count_chips(slices)


@pytest.mark.parametrize("name", ["v5e-12", "v5e-0", "v5e-512", "v4-4", "v5p-20", "3xv6e-3"])
def test_a_number_of_chips_without_a_slice_names_those_that_exist(name):
    known = list_slices(name.removeprefix("3x").partition("-")[0])
    with refused(ConfigError, *known, field="--topology", value=name):
        expand_name(name)


def test_gpus_by_name():
    one = plans.read_gpus("gpu:l4")
    assert (one.kind, one.count, one.bytes, one.peak) == ("L4", 1, 24e9, 121e12)
    assert one.bandwidth == 300e9
    assert plans.read_gpus("gpu:h100x16").count == 16
    for name in ("gpu:", "gpu:h100x0", "gpu:h900x8", "gpu:h100x-1", "gpu:h100x8x2"):
        with refused(ConfigError, field="--topology", value=name):
            plans.read_gpus(name)


def test_the_speed_of_this_cpu_is_measured():
    here = plans.this_cpu(256, 128, 512)
    x, y = np.ones((256, 128), np.float32), np.ones((128, 512), np.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(x, y))
    begin = time.perf_counter()
    for _ in range(100):
        jax.block_until_ready(multiply(x, y))
    mean = (time.perf_counter() - begin) / 100
    # the best is at least as fast as the mean, and within reach of a CPU
    assert 2 * 256 * 128 * 512 / mean * 0.5 < here.peak < 1e14
    assert here.bytes > 2**28


def test_a_cpu_with_a_matrix_unit_reaches_a_smaller_share(monkeypatch):
    monkeypatch.setattr(plans, "_measure_products", lambda *_: 1e12)
    for unit, least in ((True, 0.1), (False, 0.2)):
        monkeypatch.setattr(plans.machine, "multiplies_bfloat16", lambda unit=unit: unit)
        here = plans.this_cpu(256, 128, 512, jnp.bfloat16)
        assert here.reached[0] == least
        assert "1,000 GFLOP/s" in here.basis
        assert plans.this_cpu(256, 128, 512).reached[0] == 0.2
