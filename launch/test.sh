#!/usr/bin/env bash
# Runs the tests that need no accelerator, on all cores. Without --all the tests listed in tests/expensive.tsv are left out.
# Other arguments go to pytest: launch/test.sh tests/ops, launch/test.sh --all --budget=20.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
tier=quick
arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then tier=all; else arguments+=("$argument"); fi
done
# Two processes at least: compiled programs hold memory maps, of which a process has 65,530 on Linux. At most eight: each may take 3 GB.
workers=$(python -c 'import os; print(min(8, max(2, os.cpu_count() or 1)))')
measured() { # TIER: its number of tests, and the minutes that they take on the workers
  awk -F '\t' -v tier="# $1" -v workers="$workers" '$1 == tier { printf "%d tests, about %d minutes", $2, $3 / workers / 60 + 1 }' tests/expensive.tsv
}
other="all: launch/test.sh --all ($(measured all))"
[ "$tier" = quick ] || other="fewer: launch/test.sh ($(measured quick))"
echo "Running $(measured "$tier") on $workers processes of $(python --version); $other."
# By file, because the fixtures of a file are expensive. tests/running.py sorts the files, not xdist.
exec python -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder --durations=10 --durations-min=1 \
  --tier="$tier" -m "not gpu and not tpu" ${arguments[@]+"${arguments[@]}"}
