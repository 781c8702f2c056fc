"""Shared code of the configs of generative models.

The variant is SIZE,MIXER with any mixer of convbert_jax/config/mixers.py that has a causal form.
SIZE,attention is the Transformer baseline of that size.
"""

import dataclasses

from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice
from convbert_jax.config.mixers import MIXERS
from convbert_jax.config.sequences import SIZES


def start(recipe: str, variant: str, sizes: tuple[str, ...]):
    """Returns a ConfigDict with model and sequence sections of the variant, and its size.

    Raises:
      ConfigError: the size is not in `sizes`, or the mixer is unknown.
    """
    size, _, mixer = variant.partition(",")
    mixer = mixer or "dynamic"
    check_choice("variant", size, sizes)
    if ":" not in mixer:  # not a custom mixer
        check_choice("variant", mixer, tuple(MIXERS))
    config = to_config_dict()
    config.recipe = recipe
    config.name = f"{recipe.replace('_', '-')}-{size}-{mixer.rpartition(':')[2]}"
    config.variant = variant
    for section, values in zip(("model", "sequence"), SIZES[size](mixer), strict=True):
        config[section].update(dataclasses.asdict(values))
    return config, size
