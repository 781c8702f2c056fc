"""Arrays have the shapes and dtypes of their annotations."""

import subprocess
import sys

from tests.conftest import REPOSITORY


def test_signatures_hold():
    result = subprocess.run(
        [sys.executable, "-c", "from tests import shapes; shapes.main()"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4_000:]
