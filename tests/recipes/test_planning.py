"""Plans of runs on devices that are not available here."""

import dataclasses
import json
import math

import jax
import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis import tpu_plan
from convbert_jax.analysis.tpu_devices import CHIPS, open_topology
from convbert_jax.config import ConfigError, MeshSection
from convbert_jax.interop.networks import abstract_params
from convbert_jax.recipes import plan_search, planning
from convbert_jax.training import partitioning
from tests.refusals import refused
from tests.running import needs_libtpu
from tests.runs import make_config

ON_TPU = {
    "recipe": "masked_lm",
    "train__batch_size": 64,
    "model__hidden_size": 128,
    "model__embedding_size": 128,
    "compute_dtype": "bfloat16",
}


def test_gpus_are_counted(tmp_path):
    config = make_config(model__hidden_size=128, model__embedding_size=128, train__batch_size=64)
    whole = 4 * partitioning.count_params(abstract_params(config))

    def count(**changed):
        changed = dataclasses.replace(config, **changed)
        return recipes.plan(changed, tmp_path, topology="gpu:h100x4").numbers["memory"]

    copied = count()
    assert copied["parameters"] == copied["gradients"] == whole
    assert copied["moments"] == pytest.approx(2 * whole, abs=64)  # and Adam's step count
    divided = count(mesh=MeshSection(data=1, fsdp=4))
    assert whole / 4 < divided["parameters"] < whole / 2  # vectors and small arrays stay replicated
    assert divided["kept"] == copied["kept"]
    twice = count(train=dataclasses.replace(config.train, batch_size=128))
    assert twice["kept"] == 2 * copied["kept"]
    halved = count(train=dataclasses.replace(config.train, accumulation=2))
    assert halved["kept"] == copied["kept"] // 2
    again = count(model=dataclasses.replace(config.model, remat="full"))
    assert again["kept"] < copied["kept"] / 2


def test_a_batch_that_gpus_do_not_divide_is_refused(tmp_path):
    with refused(partitioning.ShardingError, 3):
        recipes.plan(make_config(), tmp_path, topology="gpu:h100x3")


def test_names_that_are_not_gpus_are_refused(tmp_path):
    for name in ("gpu:h100x0", "gpu:h100x00", "gpu:h1000", "gpu:h100x٣"):
        with refused(ConfigError, name, "b200"):
            recipes.plan(make_config(), tmp_path, topology=name)


def test_this_machine_is_counted_from_its_own_speed(tmp_path):
    config = make_config(train__batch_size=64)
    plan = recipes.plan(config, tmp_path, topology="cpu", price=1.0)
    numbers = plan.numbers
    assert numbers["topology"] == "cpu"
    assert numbers["by"] == "arithmetic"
    best, worst = numbers["seconds_of_a_step"]
    assert best == pytest.approx(numbers["flops"] / numbers["peak_flops"] / 0.65)
    assert worst == pytest.approx(numbers["flops"] / numbers["peak_flops"] / 0.2)
    assert "GFLOP/s" in plan.report
    # A batch too large for any machine is planned from shapes without computing anything.
    large = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=2**24))
    plan = recipes.plan(large, tmp_path, topology="cpu")
    assert "4,096 x" in plan.report
    assert not plan.fits
    # The same bytes as on a GPU with the CPU's dtype.
    config = dataclasses.replace(config, compute_dtype="float32")
    gpu = recipes.plan(config, tmp_path, topology="gpu:h100").numbers["memory"]
    same = ("parameters", "gradients", "moments")
    assert {n: numbers["memory"][n] for n in same} == {n: gpu[n] for n in same}


def test_gpus_are_compared(tmp_path):
    """The largest batch nearly fills the memory; the best mesh and remat are recommended."""
    config = make_config(recipe="masked_lm", train__batch_size=2**20, model__hidden_size=128)
    asked = {"topology": "gpu:t4x4", "largest_batch": True, "compare": True, "price": 2.0}
    result = recipes.plan(config, tmp_path, **asked)
    numbers = json.loads(json.dumps(result.numbers))
    assert not result.fits
    assert "--config.train.batch_size" in result.report
    largest = numbers["largest_batch"]
    assert largest["fits"]
    used, capacity = largest["memory"]["used"], largest["memory"]["capacity"]
    assert 0.9 * 0.92 * capacity < used <= 0.92 * capacity
    # The arithmetic estimate is linear, so the second plan uses the predicted memory.
    _, second = numbers["search"]["trials"]
    assert second["used"] == pytest.approx(second["predicted"])
    assert f"{second['rows']:,} rows" in result.report
    assert numbers["search"]["does_not_fit"]["rows"] > second["rows"]
    meshes = [tuple(each["mesh"].values()) for each in numbers["compared"]]
    assert {(1, 4, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2)} <= set(meshes)
    assert {each["remat"] for each in numbers["compared"]} == {"none", "dots", "full"}
    # Gradient accumulation comes before remat, with the fewest micro-batches that fit.
    assert numbers["recommended"]["remat"] == "none"
    fits = {
        each["accumulation"]: each["fits"]
        for each in numbers["compared"]
        if each["remat"] == "none"
    }
    assert numbers["recommended"]["accumulation"] == min(n for n, fit in fits.items() if fit) > 1
    assert numbers["recommended"]["flags"] in result.report
    best, worst = numbers["seconds_of_a_step"]
    hours = [seconds * config.train.steps * 4 / 3600 for seconds in (best, worst)]
    assert numbers["chip_hours"] == pytest.approx(hours)
    assert numbers["price"] == pytest.approx([2.0 * each for each in hours])


@pytest.mark.parametrize(("name", "loops", "gigabytes"), [("small", 1, 48.8), ("base", 12, 150.8)])
def test_a_gpu_moves_about_what_xla_compiles_for_one(tmp_path, name, loops, gigabytes):
    """Compares with the bytes in benchmarks/notes/gpu.md, compiled by XLA for an H100."""
    fields = {"model.attention_dropout": 0.0, "model.scan_unroll": loops}
    config = convbert_jax.load_config(name, **fields)
    plan = recipes.plan(config, tmp_path, topology="gpu:h100")
    numbers = plan.numbers
    assert numbers["moved"] / 1e9 == pytest.approx(gigabytes, rel=0.1)
    best, worst = numbers["seconds_of_a_step"]
    assert best > numbers["flops"] / numbers["peak_flops"] + numbers["moved"] / 3.35e12
    assert worst == pytest.approx(2.5 * best)
    assert f"{numbers['moved'] / 1e9:,.3g} GB" in plan.report
    if name == "base":
        return
    # Recomputed activations are written again.
    again = convbert_jax.load_config(name, **fields, **{"model.remat": "full"})
    remade = recipes.plan(again, tmp_path, topology="gpu:h100").numbers
    assert remade["moved"] == numbers["moved"]
    assert remade["memory"]["kept"] < numbers["memory"]["kept"]


@pytest.mark.parametrize("recipe", ["replaced_token", "masked_lm", "causal_lm", "span_corruption"])
def test_a_batch_has_the_shapes_of_training(recipe):
    config = make_config(recipe=recipe, train__batch_size=6)
    batch = planning.make_batch(config)
    assert {name: x.shape for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "segment_ids", "type_ids"), (6, 32)
    )
    task = planning.make_task(config, jax.devices()[0])
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
    batch = planning.make_batch(config, shards=4)
    assert {x.shape for x in batch.values()} == {(28, 32)}
    plan = recipes.plan(config, tmp_path, topology="gpu:l4x4")
    assert plan.numbers["tokens"] == 2 * 28 * 32
    assert plan.fits


@pytest.mark.tpu_compile
@needs_libtpu
def test_a_slice_is_compiled_for(tmp_path):
    """The arithmetic for memory and communication must agree with the compiler."""
    config = make_config(**ON_TPU)
    file = tmp_path / "plan.json"
    result = recipes.plan(config, tmp_path, topology="v5e:2x2", price=1.0, output=str(file))
    numbers = json.loads(file.read_text())
    assert numbers == json.loads(json.dumps(result.numbers))
    assert result.fits
    whole = 4 * partitioning.count_params(abstract_params(config))
    memory = numbers["memory"]
    assert memory["parameters"] == whole
    assert memory["optimizer"] == pytest.approx(2 * whole, abs=64)
    batch = 3 * 16 * 32 * 4
    assert batch <= memory["batch"] <= batch + 2**16  # arrays are aligned
    assert memory["used"] < memory["capacity"] == 15.75 * 2**30
    assert numbers["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1, "sequence": 1}
    reduced = [c for c in numbers["collectives"] if c["kind"] == "all-reduce"]
    assert {c["axes"] for c in reduced} == {"data"}
    # Each gradient is all-reduced once.
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
    """Compiles one candidate of every kind: mesh, accumulation, remat."""
    monkeypatch.setattr(plan_search, "REMAT", ("none", "full"))
    monkeypatch.setattr(plan_search, "other_meshes", lambda axes: [MeshSection(2, 1, 2, 1)])
    config = make_config(**ON_TPU)
    result = recipes.plan(config, tmp_path, topology="v5e:2x2", compare=True)
    numbers = json.loads(json.dumps(result.numbers))
    of_mesh, *of_accumulation, of_remat = numbers["compared"]
    assert tuple(of_mesh["mesh"].values()) == (2, 1, 2, 1)
    assert of_accumulation[0]["accumulation"] == 2
    assert of_remat["remat"] == "full"
    plans = [numbers, of_mesh, *of_accumulation, of_remat]
    assert all(each["fits"] for each in plans)
    fastest = min(plans, key=lambda each: sum(each["seconds_of_a_step"]))
    assert numbers["recommended"]["mesh"] == fastest["mesh"]
    assert numbers["recommended"]["flags"] in result.report.splitlines()[-1]
    assert len([line for line in result.report.splitlines() if " remat=" in line]) == len(plans)


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("kind", CHIPS)
def test_every_kind_of_chip_is_planned_for(kind, tmp_path, capfd):
    config = make_config(**ON_TPU)
    sides = "2x2x1" if CHIPS[kind].ports == 6 else "2x2"
    result = recipes.plan(config, tmp_path, topology=f"{kind}:{sides}")
    assert "stack trace" not in capfd.readouterr().err
    numbers = result.numbers
    assert numbers["fits"]
    assert numbers["memory"]["capacity"] == int(CHIPS[kind].hbm_bytes)
    devices = math.prod(numbers["mesh"].values())
    assert devices == (8 if kind == "tpu7x" else 4)
    # The gradient is summed over all devices, including both cores of a chip.
    least = 2 * (devices - 1) / devices * 4 * partitioning.count_params(abstract_params(config))
    reduced = [c for c in numbers["collectives"] if c["kind"] == "all-reduce"]
    assert {c["axes"] for c in reduced} == {"data"}
    assert least <= sum(c["sent_bytes"] for c in reduced) < 1.05 * least
    assert not any(name.startswith("all-reduce") for name in numbers["unestimated"])


@pytest.mark.tpu_compile
@needs_libtpu
def test_what_does_not_fit_is_an_answer(tmp_path):
    """The compiler fails within seconds when single arrays exceed the memory.

    At a few times the memory it would spend minutes trying to reduce the use.
    """
    config = make_config(
        recipe="masked_lm", train__batch_size=2**20, model__ffn_size=2**15,
        compute_dtype="bfloat16",
    )  # fmt: skip
    result = recipes.plan(config, tmp_path, topology="v5e:2x2")
    memory = result.numbers["memory"]
    assert not result.fits
    assert memory["capacity"] == 15.75 * 2**30
    # One array after the first matrix product of a feed-forward block.
    assert memory["needed"] > 2**20 / 4 * 32 * 2**15 * 2 > memory["capacity"]


@needs_libtpu
def test_a_slice_that_does_not_exist_is_refused(tmp_path):
    with refused(ConfigError, "v5e", "3x7"):
        open_topology("v5e:3x7")
    config = dataclasses.replace(make_config(), mesh=MeshSection(data=3))
    with refused(partitioning.ShardingError, 4):
        recipes.plan(config, tmp_path, topology="v5e:2x2")
    assert len(open_topology("v5e:2x2").devices) == 4
