#!/usr/bin/env bash
# Runs the tests that need no accelerator; arguments go to pytest, e.g. launch/test.sh -m "not slow" or launch/test.sh tests/ops.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Running the tests with $(python --version); -m 'not slow' leaves out the long ones."
exec python -m pytest -m "not gpu and not tpu" "$@"
