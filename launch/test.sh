#!/usr/bin/env bash
# Runs the tests that need no accelerator, on all cores. Without --all it leaves out those listed in tests/expensive.tsv.
# Other arguments go to pytest: bash launch/test.sh tests/ops, bash launch/test.sh --all --budget=20.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
tier=quick
arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then tier=all; else arguments+=("$argument"); fi
done
# At least two processes: compiled programs hold memory maps, and Linux allows 65,530 per process. At most eight: each may take 3 GB.
workers=$(python -c 'import os; print(min(8, max(2, os.cpu_count() or 1)))')
measured() { # TIER: prints its number of tests and their minutes on these workers
  awk -F '\t' -v tier="# $1" -v workers="$workers" '$1 == tier { printf "%d tests, about %d minutes", $2, $3 / workers / 60 + 1 }' tests/expensive.tsv
}
other="all: launch/test.sh --all ($(measured all))"
[ "$tier" = quick ] || other="fewer: launch/test.sh ($(measured quick))"
echo "Running $(measured "$tier") on $workers processes of $(python --version); $other."
# By file, because the fixtures of a file are expensive. tests/running.py sorts the files instead of xdist.
exec python -m pytest --numprocesses="$workers" --dist=loadfile --no-loadscope-reorder --durations=10 --durations-min=1 \
  --tier="$tier" -m "not gpu and not tpu" ${arguments[@]+"${arguments[@]}"}
