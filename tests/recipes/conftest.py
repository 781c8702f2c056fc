"""Runs all tests of this folder on one simulated device."""

import pytest

from tests import runs


@pytest.fixture(scope="module", autouse=True)
def _one_device():
    with runs.one_device():
        yield
