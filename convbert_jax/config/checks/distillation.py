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
            "config.distillation.initialize=True needs config.distillation.teacher, whose layers "
            "it takes; name one.",
        )
        return
    terms = d.logits_weight + d.hidden_weight + d.attention_weight + d.embeddings_weight
    rules.check(
        terms > 0 or d.initialize,
        "config.distillation.teacher teaches nothing, as all weights of config.distillation are 0; "
        "set config.distillation.logits_weight=1, for one.",
    )
    rules.check(
        terms + d.labels_weight > 0,
        "config.distillation has no weight above 0, so that there is no loss; set "
        "config.distillation.labels_weight=1.",
    )
    rules.check(
        not d.initialize or not config.init_from,
        f"config.init_from={config.init_from} and config.distillation.initialize=True are both "
        "where the weights start from; unset one.",
    )
    rules.check(
        config.objective.masked_lm_steps == 0,
        f"config.objective.masked_lm_steps={config.objective.masked_lm_steps} changes what the "
        "encoder learns, and a teacher knows one objective; set it to 0, or unset "
        "config.distillation.teacher.",
    )
