#!/usr/bin/env bash
# From nothing to a pre-trained ConvBERT in about five minutes on two CPU cores, without account, download or accelerator:
# trains a tokenizer on the docstrings of the installed Python packages, makes shards, pre-trains configs/tiny.py, and reports.
# Run it again to continue a run that was stopped. Further arguments go to the trainer, e.g. --config.train.steps=5000.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/environment.sh
echo "Pre-training configs/tiny.py in runs/tiny; stop with Ctrl-C at any time, run again to go on."
exec python -m convbert_jax.main --config=configs/tiny.py "$@"
