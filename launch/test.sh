#!/usr/bin/env bash
# Runs the tests that need no accelerator, on all cores; arguments go to pytest, e.g. launch/test.sh -m "not slow" or launch/test.sh tests/ops.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Running the tests with $(python --version); -m 'not slow' leaves out the long ones."
# By file, as fixtures of a file are dear. At least two processes: compiled programs hold memory maps, of which a process has 65,530 on
# Linux; tests/conftest.py forgets the programs of each file, so that no worker needs a new process, and keeps them in pytest's cache for
# the next run. At most eight: each may take 3 GB. The order is of tests/running.py, the dearest file first, and not xdist's.
workers=$(python -c 'import os; print(min(8, max(2, os.cpu_count() or 1)))')
exec python -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder --durations=10 --durations-min=1 \
  -m "not gpu and not tpu" "$@"
