"""All tests of this folder run on one of the simulated devices."""

import pytest

from tests import runs


@pytest.fixture(scope="package", autouse=True)
def _one_device():
    with runs.one_device():
        yield
