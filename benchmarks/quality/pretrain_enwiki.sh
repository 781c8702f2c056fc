#!/usr/bin/env bash
# The main job on real text: configs tiny and small, default and paper, on 102 MB of English Wikipedia, with vocabularies of 8,192
# entries trained on it. Some 25 minutes on two CPU cores. Usage: bash benchmarks/quality/pretrain_enwiki.sh [FOLDER FOR THE RUNS]
# The text is CONVBERT_DATA/pretrain/enwiki-2015 (default ../shared/data). Curves end up in benchmarks/figures; RESULTS.md has the numbers.
set -euo pipefail
cd "$(dirname "$0")/../.."
text=${CONVBERT_DATA:-../shared/data}/pretrain/enwiki-2015
runs=${1:-runs/enwiki}

pretrain() { # config, variant, folder of shards, then overrides
  local name=$1 variant=$2; shift 2
  python -m convbert_jax.main --config="configs/$name.py:$variant" --workdir="$runs/$name-$variant" \
    --config.data.source="text:$text/train/*" --config.data.validation_source="text:$text/valid/*" \
    --config.data.directory="$runs/shards-$variant" --config.data.length=128 --config.tokenizer.vocab_size=8192 \
    --config.train.eval_rows=512 "$@" | tee "$runs/$name-$variant.txt"
  cp "$runs/$name-$variant/curves.png" "benchmarks/figures/$name-$variant.png"
}

mkdir -p "$runs"
for variant in default paper; do
  pretrain tiny $variant --config.train.steps=400 --config.train.eval_every=50 --config.train.log_every=10
done
# The published batch of 128 rows takes half a minute a step here; 16 rows show the first 60 steps.
for variant in default paper; do
  pretrain small $variant --config.train.steps=60 --config.train.batch_size=16 --config.optimizer.learning_rate=1e-3 \
    --config.optimizer.warmup_steps=15 --config.train.eval_every=15 --config.train.log_every=3 --config.checkpoint.every=30
done
