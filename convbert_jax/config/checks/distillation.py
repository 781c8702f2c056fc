"""What must hold of config.distillation before its teacher is read."""

from convbert_jax.config.checks import rules
from convbert_jax.config.run import Config

LAYER_RULES = ("last", "uniform", "top", "bottom")
HIDDEN = ("cosine", "mse")
ATTENTION = ("maps", "scores")


def check_distillation(config: Config) -> None:
    """Raises ConfigError for the first thing that cannot work."""
    d = config.distillation
    rules.check_choice("distillation.layers", d.layers, LAYER_RULES)
    rules.check_choice("distillation.hidden", d.hidden, HIDDEN)
    rules.check_choice("distillation.attention", d.attention, ATTENTION)
    if not d.teacher:
        rules.check(
            not d.initialize,
            "needs config.distillation.teacher, whose layers it takes; name one.",
            field="config.distillation.initialize",
            value=True,
        )
        return
    terms = d.logits_weight + d.hidden_weight + d.attention_weight + d.embeddings_weight
    rules.check(
        terms > 0 or d.initialize,
        "teaches nothing, as all weights of config.distillation are 0; set "
        "config.distillation.logits_weight=1, for one.",
        field="config.distillation.teacher",
    )
    rules.check(
        terms + d.labels_weight > 0,
        "has no weight above 0, so that there is no loss; set config.distillation.labels_weight=1.",
        field="config.distillation",
    )
    rules.check(
        not d.initialize or not config.init_from,
        "and config.distillation.initialize=True are both where the weights start from; unset one.",
        field="config.init_from",
        value=config.init_from,
    )
    rules.check(
        config.objective.masked_lm_steps == 0,
        "changes what the encoder learns, and a teacher knows one objective; set it to "
        "0, or unset config.distillation.teacher.",
        field="config.objective.masked_lm_steps",
        value=config.objective.masked_lm_steps,
    )
