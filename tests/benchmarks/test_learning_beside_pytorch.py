"""What PyTorch's runs are given: masks as the objective has them, and runs that it can follow."""

import numpy as np
import pytest

from benchmarks.quality import learning_beside_pytorch as learning
from convbert_jax.config import ConfigError
from convbert_jax.interop.matching import replace
from tests.runs import make_config

SPECIAL, MASK, WORDS = np.arange(5), 4, 1_000


def test_masks_are_those_of_the_objective():
    config = make_config(
        objective__mask_fraction=0.25,
        objective__mask_token_fraction=0.8,
        objective__random_token_fraction=0.1,
    )
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 65, 400)
    real = np.arange(64) < lengths[:, None]
    tokens = np.where(real, rng.integers(5, WORDS, real.shape), 0)
    tokens[:, 0] = 2
    batch = {"tokens": tokens, "segment_ids": real.astype(int), "type_ids": 0 * tokens}
    found = learning.Mask(config, SPECIAL, MASK, WORDS)(batch, rng)
    chosen = found["labels"] != learning.IGNORED
    assert (chosen.sum(1) == np.round(0.25 * lengths)).all()
    assert (found["labels"][chosen] == tokens[chosen]).all()
    assert not (chosen & (~real | (tokens < 5))).any()
    assert (found["tokens"] == tokens)[~chosen].all()
    masked = (found["tokens"] == MASK)[chosen].mean()
    kept = (found["tokens"] == tokens)[chosen].mean()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1, abs=0.02)


def test_what_pytorch_cannot_follow_is_refused():
    config = make_config(
        recipe="masked_lm", data__layout="electra", optimizer__method="adamw", model__types=2
    )
    learning.check(config)
    with pytest.raises(ConfigError, match=r"config\.optimizer\.method='muon'; only 'adamw'"):
        learning.check(replace(config, {"optimizer.method": "muon"}))
    with pytest.raises(ConfigError, match=r"mixer='light'; transformers has"):
        learning.check(replace(config, {"model.mixer": "light"}))
