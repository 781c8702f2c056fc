"""Validation of config.distillation before the teacher is loaded."""

from convbert_jax.config.checks import rules
from convbert_jax.config.run import Config

LAYER_RULES = ("last", "uniform", "top", "bottom")
HIDDEN = ("cosine", "mse")
ATTENTION = ("maps", "scores")


def check_distillation(config: Config) -> None:
    """Raises ConfigError for the first invalid field."""
    d = config.distillation
    rules.check_choice("distillation.layers", d.layers, LAYER_RULES)
    rules.check_choice("distillation.hidden", d.hidden, HIDDEN)
    rules.check_choice("distillation.attention", d.attention, ATTENTION)
    if not d.teacher:
        rules.check(
            not d.initialize,
            "needs config.distillation.teacher, which provides the layers; set it.",
            field="config.distillation.initialize",
            value=True,
        )
        return
    terms = d.logits_weight + d.hidden_weight + d.attention_weight + d.embeddings_weight
    rules.check(
        terms > 0 or d.initialize,
        "has no effect: all weights of config.distillation are 0; set, for example, "
        "config.distillation.logits_weight=1.",
        field="config.distillation.teacher",
    )
    rules.check(
        terms + d.labels_weight > 0,
        "has no weight above 0, so there is no loss; set config.distillation.labels_weight=1.",
        field="config.distillation",
    )
    rules.check(
        not d.initialize or not config.init_from,
        "and config.distillation.initialize=True both set the initial weights; unset one.",
        field="config.init_from",
        value=config.init_from,
    )
    rules.check(
        config.objective.masked_lm_steps == 0,
        "switches the objective, but distillation supports one objective only; set it to 0, or "
        "unset config.distillation.teacher.",
        field="config.objective.masked_lm_steps",
        value=config.objective.masked_lm_steps,
    )
