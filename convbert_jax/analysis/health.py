"""Health checks: warnings if training metrics are outside of their usual ranges.

Reference: a base-size ConvBERT after 1M steps has generator accuracy 0.62 (sampled 0.54), AUC 0.88,
precision 0.79 and recall 0.27 (card of the published Spanish model). Its replaced rate is
0.15 * (1 - 0.54) = 0.07. The ELECTRA authors warn of a generator that becomes accurate too early,
so that the discriminator cannot learn.
"""

import math

# No checks before these steps, when metrics are noise.
_FIRST_STEP = 500
_CHANCE_STEP = 2_000


def warn_replaced_token(step: int, values: dict[str, float], uniform: bool = False) -> list[str]:
    """Returns warnings for a log interval of replaced-token detection.

    Args:
      step: completed steps.
      values: summarized metrics of `replaced_token`.
      uniform: replacements are drawn uniformly, so there is no generator to check.
    """
    warnings = []
    if step < _FIRST_STEP:
        return warnings
    replaced, sampled = values["replaced_rate"], values["sampled_accuracy"]
    auc, accuracy = values["discriminator_auc"], values["mlm_accuracy"]
    if replaced < 0.03 or sampled > 0.75:
        warnings.append(
            f"generator too strong: {sampled:.0%} of its samples are the original token, so only "
            f"{replaced:.1%} of the tokens are replaced (usual: 5 to 14%). Lower "
            "config.generator.size, or check for near-duplicate text."
        )
    if math.isnan(auc):
        warnings.append(
            "no tokens replaced: the discriminator had nothing to learn in this interval."
        )
    elif step >= _CHANCE_STEP and auc < 0.55:
        warnings.append(
            f"discriminator no better than chance: AUC {auc:.3f} after {step} steps (usual: above "
            "0.6). Check config.optimizer.learning_rate, the warmup, and whether the tokenizer "
            "fits the corpus."
        )
    elif step >= _CHANCE_STEP and auc > 0.99:
        warnings.append(
            f"discriminator task too easy: AUC {auc:.3f}; the generator is too weak or the text "
            "too regular. Raise config.generator.size."
        )
    if step >= _CHANCE_STEP and accuracy < 0.03 and not uniform:
        warnings.append(
            f"generator does not learn: accuracy {accuracy:.1%} after {step} steps (usual: above "
            "10%). Check config.optimizer.learning_rate and the tokenizer."
        )
    return warnings


def warn_masked_lm(step: int, values: dict[str, float]) -> list[str]:
    """Returns warnings for a log interval of masked language modeling."""
    accuracy = values["mlm_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.03:
        return [
            f"model does not learn: accuracy {accuracy:.1%} after {step} steps (usual: above 10%). "
            "Check config.optimizer.learning_rate and the tokenizer."
        ]
    return []


def warn_writing(step: int, values: dict[str, float]) -> list[str]:
    """Returns warnings for a log interval of a generative model."""
    accuracy = values["token_accuracy"]
    if step >= _CHANCE_STEP and accuracy < 0.05:
        return [
            f"model does not learn: next-token accuracy {accuracy:.1%} after {step} steps (usual: "
            "above 20%). Check config.optimizer.learning_rate, the warmup and the tokenizer."
        ]
    return []
