"""Cost of a training step by the TPU compiler's cost model, checked to 3%.

Models have two layers instead of twelve to compile in minutes, in a scan unless unrolled. The
cost covers layers, embeddings, logits, sampling, the update and communication.
benchmarks/RESULTS.md and benchmarks/notes/tpu_steps.md have full steps. Update both after any
change of cost, including a reduction.
"""

import functools
import importlib.metadata

import pytest

from benchmarks import step
from convbert_jax.analysis.tpu_devices import open_topology
from convbert_jax.recipes.planning import plan_slice
from tests.running import needs_libtpu

pytestmark = [pytest.mark.slow, pytest.mark.tpu_compile, needs_libtpu]

LIBTPU = "0.0.52"  # costs depend on the version

# Million cycles per chip of v5e:2x2, 128 rows x 128 tokens per chip: matmuls, all else.
PRICES = {"small": (8.71, 6.15), "base": (24.63, 20.59), "electra-base": (25.17, 18.83)}
UNROLLED = {
    "small": (8.15, 3.85),
    "base": (24.56, 13.55),
}  # the default of the published sizes
# ConvBERT's cost / ELECTRA's: compiler costs with kernels at full bandwidth; everything at full
# bandwidth; everything at the compiler's bandwidth.
RATIOS = 1.028, 1.007, 1.030
FSDP = (24.1, 19.0)  # base with parameters sharded over the four chips
FSDP_MEGABYTES = 234


@functools.cache
def plan(name: str, **changed) -> dict:
    if (version := importlib.metadata.version("libtpu")) != LIBTPU:
        pytest.skip(f"the costs are for libtpu {LIBTPU}, found {version}")
    fields = {field.replace("__", "."): value for field, value in changed.items()}
    fields = {"model.layers": 2, "model.scan_unroll": 1} | fields
    config = step.read_config(name, "512x128", fields)
    settings = {"largest_batch": False, "compare": False, "price": None}
    return plan_slice(config, open_topology("v5e:2x2"), **settings).numbers


def bytes_of_gradients(numbers: dict) -> float:
    """Return the bytes a device sends to all-reduce float32 gradients in a ring of four."""
    return 2 * 3 / 4 * numbers["memory"]["parameters"]


def sent_bytes(numbers: dict) -> float:
    return sum(each["sent_bytes"] for each in numbers["collectives"])


@pytest.mark.parametrize("name", PRICES)
def test_a_step_costs_what_it_did(name):
    numbers = plan(name)
    cycles = step.count_cycles(numbers, "tpu:v5e")
    found = cycles.products / 1e6, (cycles.kernels + cycles.rest) / 1e6
    assert found == pytest.approx(PRICES[name], rel=0.03)

    least = bytes_of_gradients(numbers)
    assert least <= sent_bytes(numbers) < 1.1 * least


@pytest.mark.parametrize("name", UNROLLED)
def test_unrolled_layers_cost_less(name):
    numbers = plan(name, model__scan_unroll=12)
    assert "stacks" not in " ".join(part for part, n in numbers["cycles_by_part"].items() if n)
    cycles = step.count_cycles(numbers, "tpu:v5e")
    found = cycles.products / 1e6, (cycles.kernels + cycles.rest) / 1e6
    assert found == pytest.approx(UNROLLED[name], rel=0.03)


def test_gradients_in_bfloat16_are_half_of_what_is_sent():
    numbers = plan("base", train__gradient_dtype="bfloat16")
    half = bytes_of_gradients(numbers) / 2
    assert half <= sent_bytes(numbers) < 1.05 * half
    cycles = step.count_cycles(numbers, "tpu:v5e").as_priced / 1e6
    assert cycles == pytest.approx(sum(PRICES["base"]), rel=0.03)


def test_parameters_over_chips_are_fetched():
    numbers = plan("base", mesh__fsdp=4)
    cycles = step.count_cycles(numbers, "tpu:v5e")
    found = cycles.products / 1e6, (cycles.kernels + cycles.rest) / 1e6
    assert found == pytest.approx(FSDP, rel=0.03)
    assert sent_bytes(numbers) / 1e6 < 1.03 * FSDP_MEGABYTES


def test_convbert_costs_what_electra_does_at_equal_shapes():
    """Holds at either bandwidth, in a scan. RESULTS has full steps without a scan."""
    convbert, electra = (
        step.count_cycles(plan(name), "tpu:v5e") for name in ("base", "electra-base")
    )
    ratios = (
        convbert.as_priced / electra.as_priced,
        convbert.at_full_bandwidth / electra.at_full_bandwidth,
        convbert.at_compilers_bandwidth / electra.at_compilers_bandwidth,
    )
    assert ratios == pytest.approx(RATIOS, rel=0.03)
