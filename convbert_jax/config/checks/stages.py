"""Validation of the stages of an encoder and its generator; mixers check their own fields."""

from collections.abc import Sequence

from convbert_jax.config.checks.bounds import STAGE_BOUNDS, check_number
from convbert_jax.config.checks.rules import check
from convbert_jax.config.mixers import check_name
from convbert_jax.config.network import GeneratorSizes, list_stages, schedules
from convbert_jax.config.sections import GeneratorSection, ModelSection


def check_stages(model: ModelSection, others: Sequence[tuple[str, tuple[str, ...]]] = ()) -> None:
    """Raises ConfigError for the first invalid field.

    Args:
      others: (mixer, mixer_fields) of layers outside of these stages, as in a decoder.
    """
    for i, section in enumerate(model.stages):
        for field, bounds in STAGE_BOUNDS.items():
            check_number(f"model.stages[{i}].{field}", getattr(section, field), bounds)
        check(
            not section.mixer_fields or section.mixer != "",
            f"needs a mixer; set config.model.stages[{i}].mixer.",
            field=f"config.model.stages[{i}].mixer_fields",
            value=section.mixer_fields,
        )
    check_name(model.mixer, "config.model.mixer")
    for name, numbers in schedules(model).items():
        check(
            not model.stages,
            f"config.model.{name}s and config.model.stages both describe the layers; set {name} in "
            f"each of config.model.stages and clear the other: --config.model.{name}s=",
            field=f"config.model.{name}",
        )
        check(
            len(numbers) == model.layers,
            f"config.model.{name}s has {len(numbers)} numbers, but config.model.layers="
            f"{model.layers}; set one number per layer.",
            field=f"config.model.{name}",
        )
    for stage in list_stages(model):
        sizes, names = stage.sizes, stage.names
        check_name(sizes.mixer, names["mixer"])
        heads = sizes.heads
        check(
            model.hidden_size % heads == 0,
            f"is not divisible by {names['heads']}={heads}; use "
            f"{model.hidden_size // heads * heads or heads} or "
            f"{(model.hidden_size // heads + 1) * heads}.",
            field="config.model.hidden_size",
            value=model.hidden_size,
        )
        widths = {"config.model.hidden_size": model.hidden_size, names["ffn_size"]: sizes.ffn_size}
        for name, width in widths.items():
            check(
                width % sizes.ffn_groups == 0,
                f"is not divisible by {names['ffn_groups']}={sizes.ffn_groups}.",
                field=name,
                value=width,
            )
    taken = [(stage.sizes.mixer, stage.sizes.mixer_fields) for stage in list_stages(model)]
    taken += others
    check(
        not model.mixer_fields or (model.mixer, model.mixer_fields) in taken,
        "is not used: every stage in config.model.stages sets another mixer or its own "
        "mixer_fields; remove it.",
        field="config.model.mixer_fields",
        value=",".join(model.mixer_fields),
    )
    layers = sum(section.layers for section in model.stages)
    check(
        not model.stages or layers == model.layers,
        f"has {layers} layers, but config.model.layers={model.layers}; make them equal.",
        field="config.model.stages",
    )


def check_generator(model: ModelSection, section: GeneratorSection) -> None:
    """Raises ConfigError if the sizes of a separate generator are invalid."""
    derived = GeneratorSizes(model, section)
    hidden = derived.hidden_size
    for stage in list_stages(model):
        heads, groups = derived.heads(stage), stage.sizes.ffn_groups
        check(
            hidden >= heads and hidden % heads == 0,
            f"gives the generator {hidden} channels, which are not divisible by its {heads} heads; "
            "change config.generator.size.",
            field="config.generator.size",
            value=section.size,
        )
        check(
            hidden % groups == 0,
            f"gives the generator {hidden} channels, which are not divisible by "
            f"{stage.names['ffn_groups']}={groups}; change config.generator.size.",
            field="config.generator.size",
            value=section.size,
        )
