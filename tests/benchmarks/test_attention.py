"""benchmarks/layers/attention.py: its table, and what it says of the kernels."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.running import needs_libtpu

FORMS = "xla", "pallas_tpu"


@pytest.mark.slow
@pytest.mark.tpu_compile
@needs_libtpu
@pytest.mark.parametrize("length", [128, 512])
def test_kernels_cost_a_third_of_scores_in_memory(length):
    flags = ["--lengths", str(length), "--forms", *FORMS]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.layers.attention", *flags],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[3:]]
    cycles = {(form, rate): float(cost.replace(",", "")) for _, form, rate, cost, *_ in rows}
    assert set(cycles) == {
        (form, rate) for form in ("xla", "pallas_tpu") for rate in ("0.0", "0.1")
    }
    for rate in ("0.0", "0.1"):
        assert cycles["pallas_tpu", rate] < cycles["xla", rate] / 3
    # Dropout is drawn while the matrix unit works.
    assert cycles["pallas_tpu", "0.1"] < 1.1 * cycles["pallas_tpu", "0.0"]
