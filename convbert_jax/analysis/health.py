"""Is this run normal? Reference bands for replaced-token detection, as warnings in words.

Anchors: a base-size ConvBERT after 1M steps has generator accuracy 0.62 (sampled 0.54), AUC 0.88,
precision 0.79, recall 0.27 (the published Spanish model's card), that is a replaced rate of 0.15 *
(1 - 0.54) = 0.07; the ELECTRA authors warn of a generator that gets good too fast and leaves the
discriminator nothing to learn.
"""

import math

# Below these nothing is judged: the first steps are noise.
_FIRST_STEP = 500
_CHANCE_STEP = 2_000


def warn_replaced_token(step: int, values: dict[str, float], uniform: bool = False) -> list[str]:
    """Warnings for one interval of a replaced-token run; empty if all is in its band.

    Args:
      step: steps done.
      values: summarized metrics of `replaced_token`.
      uniform: replacements are drawn uniformly, so there is no generator that could learn.
    """
    warnings = []
    if step < _FIRST_STEP:
        return warnings
    replaced, sampled = values["replaced_rate"], values["sampled_accuracy"]
    auc, accuracy = values["discriminator_auc"], values["mlm_accuracy"]
    if replaced < 0.03 or sampled > 0.75:
        warnings.append(
            f"generator too strong: it samples the original token {sampled:.0%} of the time, so "
            f"only {replaced:.1%} of "
            "the tokens are fake (usual: 5 to 14%); lower config.generator.size, or look for "
            "near-duplicate text."
        )
    if math.isnan(auc):
        warnings.append(
            "no token was replaced in this interval, so the discriminator has nothing to learn."
        )
    elif step >= _CHANCE_STEP and auc < 0.55:
        warnings.append(
            f"discriminator no better than chance: AUC {auc:.3f} after {step} steps (usual: "
            "above 0.6 by now); check "
            "config.optimizer.learning_rate, the warm-up, and that the tokenizer fits the corpus."
        )
    elif step >= _CHANCE_STEP and auc > 0.99:
        warnings.append(
            f"discriminator has it too easy: AUC {auc:.3f}; the generator is too weak or the "
            "text too regular, raise "
            "config.generator.size."
        )
    if step >= _CHANCE_STEP and accuracy < 0.03 and not uniform:
        warnings.append(
            f"generator hardly learns: accuracy {accuracy:.1%} after {step} steps (usual: above "
            "10% by now); check "
            "config.optimizer.learning_rate and the tokenizer."
        )
    return warnings


def warn_masked_lm(step: int, values: dict[str, float]) -> list[str]:
    """Warnings for one interval of a masked-language-model run."""
    accuracy = values["mlm_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.03:
        return [
            f"model hardly learns: accuracy {accuracy:.1%} after {step} steps (usual: above 10% "
            "by now); check "
            "config.optimizer.learning_rate and the tokenizer."
        ]
    return []


def warn_writing(step: int, values: dict[str, float]) -> list[str]:
    """Warnings for one interval of a model that writes text."""
    accuracy = values["token_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.05:
        return [
            f"model hardly learns: {accuracy:.1%} of the next tokens right after {step} steps "
            "(usual: above 20% by now); check config.optimizer.learning_rate, the warm-up and the "
            "tokenizer."
        ]
    return []
