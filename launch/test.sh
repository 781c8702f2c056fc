#!/usr/bin/env bash
# Runs the tests that need no accelerator; arguments go to pytest, e.g. launch/test.sh -m "not slow" or launch/test.sh tests/ops.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Running the tests with $(python --version); -m 'not slow' leaves out the long ones."
run() {
  python -m pytest -m "not gpu and not tpu" "$@"
}
if [[ " $*" == *" tests"* ]]; then
  run "$@"
  exit
fi
# All of them as two processes: compiled programs hold memory maps, of which a process has 65,530 on Linux, and in a process of an hour
# the profiler has crashed.
second=(tests/models tests/objectives tests/ops tests/parity tests/training)
run "${second[@]/#/--ignore=}" "$@"
run "${second[@]}" "$@"
