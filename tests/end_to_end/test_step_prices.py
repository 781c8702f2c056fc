"""What a whole training step costs by the TPU compiler's model, held to 3%.

Two layers stand for twelve, so that it compiles in minutes: what a layer costs, what is paid once
(embeddings, logits, the draw, the update), and what is sent. The whole steps are in RESULTS,
section 15. A change that makes one dearer has to say so there and here; so has one that makes it
cheaper, or the next one may waste what it gained.
"""

import importlib
import importlib.metadata

import pytest

from convbert_jax import recipes
from convbert_jax.config import from_config_dict
from tests.running import needs_libtpu

LIBTPU = "0.0.52"  # another one has other prices

# million cycles of a chip of v5e:2x2, 128 rows x 128 tokens each: products, all else
PRICES = {"small": (9.01, 10.06), "base": (25.03, 23.15)}


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("name", PRICES)
def test_a_step_costs_what_it_did(tmp_path, name):
    if (version := importlib.metadata.version("libtpu")) != LIBTPU:
        pytest.skip(f"the prices are those of libtpu {LIBTPU}, this is {version}")
    config = importlib.import_module(f"configs.{name}").get_config().unlock()
    config.model.layers = 2
    config.train.batch_size = 4 * 128
    numbers = recipes.plan(from_config_dict(config), tmp_path, topology="v5e:2x2").numbers

    cycles = numbers["cycles"]
    products = cycles.pop("matrix products")
    found = products / 1e6, sum(cycles.values()) / 1e6
    assert found == pytest.approx(PRICES[name], rel=0.03)

    # Every gradient is sent once, by a ring of four, and next to nothing else.
    least = 2 * 3 / 4 * numbers["memory"]["parameters"]
    assert least <= sum(c["sent_bytes"] for c in numbers["collectives"]) < 1.1 * least
