"""Every warning appears just past its threshold and not at it, alone, with the numbers it names."""

import math

import pytest

from convbert_jax.analysis.health import warn_masked_lm, warn_replaced_token

USUAL = {
    "replaced_rate": 0.07,
    "sampled_accuracy": 0.54,
    "discriminator_auc": 0.88,
    "mlm_accuracy": 0.62,
}
STRONG = "generator too strong"
NOTHING = "no token was replaced"
CHANCE = "discriminator no better than chance"
EASY = "discriminator has it too easy"
SLOW = "generator hardly learns"


@pytest.mark.parametrize(
    ("name", "fine", "warned", "first_step", "says"),
    [
        ("replaced_rate", 0.03, 0.0299, 500, STRONG),
        ("sampled_accuracy", 0.75, 0.7501, 500, STRONG),
        ("discriminator_auc", 0.88, math.nan, 500, NOTHING),
        ("discriminator_auc", 0.55, 0.5499, 2_000, CHANCE),
        ("discriminator_auc", 0.99, 0.9901, 2_000, EASY),
        ("mlm_accuracy", 0.03, 0.0299, 2_000, SLOW),
    ],
)
def test_thresholds(name, fine, warned, first_step, says):
    for step in (0, first_step - 1, first_step, 1_000_000):
        assert warn_replaced_token(step, USUAL | {name: fine}) == []
        warnings = warn_replaced_token(step, USUAL | {name: warned})
        if step < first_step:
            assert warnings == []
        else:
            (warning,) = warnings
            assert warning.startswith(says)


def test_what_is_wrong_together_is_said_together():
    """In this order; a step before the second threshold keeps what needs the time to itself."""
    values = {
        "replaced_rate": 0.0, "sampled_accuracy": 1.0, "discriminator_auc": 0.5,
        "mlm_accuracy": 0.0,
    }  # fmt: skip
    for step, expected in ((499, []), (1_999, [STRONG]), (2_000, [STRONG, CHANCE, SLOW])):
        warnings = warn_replaced_token(step, values)
        assert len(warnings) == len(expected)
        for warning, says in zip(warnings, expected, strict=True):
            assert warning.startswith(says)


def test_warnings_give_the_numbers():
    values = USUAL | {"replaced_rate": 0.0123, "sampled_accuracy": 0.91}
    (warning,) = warn_replaced_token(500, values)
    assert "samples the original token 91% of the time" in warning
    assert "only 1.2% of the tokens are fake" in warning
    (warning,) = warn_replaced_token(2_345, USUAL | {"discriminator_auc": 0.512})
    assert "AUC 0.512 after 2345 steps" in warning
    (warning,) = warn_replaced_token(2_345, USUAL | {"discriminator_auc": 0.995})
    assert "AUC 0.995" in warning
    (warning,) = warn_replaced_token(2_345, USUAL | {"mlm_accuracy": 0.021})
    assert "accuracy 2.1% after 2345 steps" in warning


def test_masked_lm():
    for step, accuracy in ((1_999, 0.0), (2_000, 0.03), (2_000, 0.4)):
        assert warn_masked_lm(step, {"mlm_accuracy": accuracy}) == []
    (warning,) = warn_masked_lm(2_000, {"mlm_accuracy": 0.0299})
    assert warning.startswith("model hardly learns: accuracy 3.0% after 2000 steps")
