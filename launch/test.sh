#!/usr/bin/env bash
# Runs the tests that need no accelerator and take seconds, on all cores; arguments go to pytest, e.g. launch/test.sh tests/ops, -m slow for
# the long ones, -m "" for all, --budget=20 for what twenty minutes allow.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Running the tests with $(python --version); -m slow runs the long ones, which are left out otherwise."
# By file, as fixtures of a file are dear. At least two processes: compiled programs hold memory maps, of which a process has 65,530 on
# Linux; tests/conftest.py forgets the programs of each file, so that no worker needs a new process, and keeps them in pytest's cache for
# the next run. At most eight: each may take 3 GB. The order is of tests/running.py, the dearest file first, and not xdist's.
workers=$(python -c 'import os; print(min(8, max(2, os.cpu_count() or 1)))')
exec python -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder --durations=10 --durations-min=1 \
  -m "not slow and not gpu and not tpu" "$@"
