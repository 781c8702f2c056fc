#!/usr/bin/env bash
# Pre-trains configs/tiny.py in about five minutes on two CPU cores, without an account, a download or an accelerator: trains a tokenizer on the
# docstrings of the installed Python packages, writes shards, trains, and writes a report. Run it again to continue a run that was stopped.
# Further arguments go to the trainer: bash launch/quickstart.sh --config.train.steps=5000
set -euo pipefail
called_from=$PWD
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Pre-training configs/tiny.py in runs/tiny. Stop with Ctrl-C at any time; run the script again to continue."
guard=() # where setpriv exists, Python receives SIGTERM and saves when this script is killed
if command -v setpriv >/dev/null; then guard=(setpriv --pdeathsig TERM --); fi
${guard[@]+"${guard[@]}"} python -m convbert_jax.main --config=configs/tiny.py "$@"
if [ -z "$active" ]; then
  go=
  if [ "$called_from" != "$PWD" ]; then go="cd $(printf %q "$PWD") && "; fi
  printf '\n%s\n  %s\n' "The other commands of README.md need the virtual environment. Activate it once in each terminal:" "${go}source .venv/bin/activate"
fi
