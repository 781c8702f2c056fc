"""Predictions for held-out rows at the end of a run; the report shows the first row in full."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.analysis.pretraining_report import Cloze, Suspects, find_suspects, pair_subwords
from convbert_jax.config import Config
from convbert_jax.data.corpus import batching
from convbert_jax.data.corpus.corpus import Corpus
from convbert_jax.interop.networks import MODELS
from convbert_jax.models.build import build
from convbert_jax.objectives import masked_lm, replaced_token

_ROWS = 32  # at most


def fill_in(config: Config, corpus: Corpus | None, params) -> Cloze | None:
    """Predicts masked tokens; for config.recipe=replaced_token with the generator.

    Returns:
      None if no part of the model is trained for it, or with several processes, because each has
      only some of the rows.
    """
    generated = config.recipe == "replaced_token" and config.generator.kind != "uniform"
    if not (generated or config.recipe == "masked_lm") or jax.process_count() > 1:
        return None

    def run(model, batch, key, settings):
        masked, logits = masked_lm.hide_and_predict(model, batch, key, None, **settings)
        return masked.positions, masked.weights, logits.argmax(axis=-1)

    batch, (positions, weights, guesses) = _run(config, corpus, params, run)
    subwords, right, hidden = (), 0, 0
    for row, ids in enumerate(batch["segment_ids"]):
        old, used = batch["tokens"][row], weights[row] > 0
        new, is_hidden = old.copy(), np.zeros(len(old), bool)
        new[positions[row][used]], is_hidden[positions[row][used]] = guesses[row][used], True
        right, hidden = right + (new == old)[is_hidden].sum(), hidden + is_hidden.sum()
        if not subwords:
            subwords = _pair(corpus, new, old, is_hidden, ids)
    return Cloze(subwords, _count_rows(batch), float(right / max(1, hidden)))


def detect(config: Config, corpus: Corpus | None, params) -> Suspects | None:
    """Replaces tokens by the generator and predicts them by the discriminator; None: `fill_in`."""
    if config.recipe != "replaced_token" or jax.process_count() > 1:
        return None

    def run(model, batch, key, settings):
        corrupted = replaced_token.corrupt(model, batch, key, train=False, **settings)[-1]
        ids, types = batch["segment_ids"], batch["type_ids"]
        return corrupted, model.discriminate(corrupted, ids, types, dtype=jnp.float32, key=None)

    batch, (corrupted, scores) = _run(config, corpus, params, run)
    subwords, replaced, found, tokens = (), 0, 0, 0
    for new, old, score, ids in zip(
        corrupted, batch["tokens"], scores, batch["segment_ids"], strict=True
    ):
        fake, real = new != old, ids != 0
        suspects = np.zeros(len(new), bool)
        suspects[real] = find_suspects(fake[real], score[real])
        replaced, found = replaced + fake[real].sum(), found + (suspects & fake).sum()
        tokens += real.sum()
        if not subwords:
            subwords = _pair(corpus, new, old, suspects, ids)
    found, chance = float(found / max(1, replaced)), float(replaced / max(1, tokens))
    return Suspects(subwords, _count_rows(batch), found, chance)


def _run(config, corpus, params, run):
    """Returns (batch, result of `run` on it), both on the host."""
    graphdef, _ = build(MODELS[config.recipe], config)
    settings = {"dtype": jnp.float32, "config": config, "special": corpus.tokenizer.special}

    @jax.jit
    def compute(params, batch):
        return run(nnx.merge(graphdef, params), batch, jax.random.key(config.seed), settings)

    batch = next(batching.evaluation_batches(corpus, batch_size=_ROWS, rows=_ROWS))
    return batch, jax.device_get(compute(params, batch))


def _count_rows(batch) -> int:
    """Counts rows with text; a batch of less held-out text is filled up by rows of padding."""
    return int((batch["segment_ids"] != 0).any(axis=1).sum())


def _pair(corpus, new, old, marked, segment_ids):
    pieces, real = corpus.tokenizer.pieces, np.flatnonzero(segment_ids)
    return pair_subwords(pieces(new[real]), pieces(old[real]), marked[real])
