"""Accuracy of frozen text features of a pre-trained encoder, in a minute.

    python -m benchmarks.quality.frozen_features --init-from=runs/tiny --task TREC

Logistic regression on features of frozen weights, pre-trained and random: [CLS] and the mean over
tokens of the last layer, and the mean of the embeddings. Uses 2,000 training rows and at most 2,000
scored rows of a task of finetuning_gain.py, with files below CONVBERT_DATA. Texts are truncated to
64 tokens, features are standardized, and the regularization is not tuned.
"""

import argparse
import logging
import os
import sys

import numpy as np

from benchmarks import timing
from benchmarks.quality.finetuning_gain import SOURCES, open_source
from convbert_jax.config import UserError

FEATURES = ("[CLS]", "mean of the last layer", "mean of the embeddings")
LENGTH, BATCH = 64, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init-from", required=True, help="the pre-trained run")
    parser.add_argument("--task", default="TREC", choices=list(SOURCES))
    parser.add_argument("--rows", type=int, default=2_000)
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        source = open_source(arguments.task)
        table = timing.Table(f"{arguments.task}, accuracy", *FEATURES)
        for name, train, scored in extract(arguments, source):
            table.add(name, *(100 * probe(*pair) for pair in zip(train, scored, strict=True)))
    except UserError as error:
        sys.exit(f"error: {error}")


def extract(arguments, source):
    """Yields (weights, list of (features [N, C], labels) for training and scored rows)."""
    import jax
    from flax import nnx

    from configs import text
    from convbert_jax.config import from_config_dict, to_dict
    from convbert_jax.models.networks import FinetunedModel
    from convbert_jax.recipes import finetuning

    values = to_dict(from_config_dict(text.get_config("own")))
    values["init_from"] = arguments.init_from
    config, tokenizer, weights = finetuning.read_start(from_config_dict(values))
    rows = [
        draw_rows(source, arguments.rows, tokenizer, split)
        for split in ("train", SOURCES[arguments.task][2])
    ]
    graphdef, state = nnx.split(FinetunedModel(config, nnx.Rngs(config.seed)))
    random = nnx.to_pure_dict(state)

    @jax.jit
    def run(params, batch):
        model = nnx.merge(graphdef, params)
        inputs = batch["tokens"], batch["segment_ids"], batch["type_ids"]
        hidden, embedded = model.encode(*inputs), model.embeddings(*inputs)
        real = (batch["segment_ids"] > 0)[..., None]
        return hidden[:, 0], *((x * real).sum(1) / real.sum(1) for x in (hidden, embedded))

    def features(params, batches, labels):
        found = [jax.device_get(run(params, batch)) for batch in batches]
        return [(np.concatenate(parts), labels) for parts in zip(*found, strict=True)]

    for name, params in (("pre-trained", random | weights), ("random", random)):
        yield name, *(features(params, *split) for split in rows)


def draw_rows(source, count: int, tokenizer, split: str):
    """Returns (batches of encoded rows, their labels)."""
    from convbert_jax.data.tasks.labelled_text import encode_texts

    examples = source.read(split)
    chosen = np.random.default_rng(0).permutation(len(examples))[:count]
    texts = [examples[i].texts for i in chosen]
    rows = encode_texts(tokenizer, texts, length=LENGTH, types=2).rows
    starts = range(0, len(chosen), BATCH)
    batches = [rows.batch(np.arange(s, min(s + BATCH, len(chosen))), LENGTH) for s in starts]
    return batches, np.asarray([examples[i].label for i in chosen])


def probe(train, scored) -> float:
    """Returns the accuracy on the scored rows."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=300, tol=1e-2))
    return model.fit(*train).score(*scored)


if __name__ == "__main__":
    logging.getLogger().setLevel(logging.WARNING)
    main()
