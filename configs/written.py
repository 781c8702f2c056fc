"""What the configs of models that write text share: SIZE,MIXER behind the colon of --config, any
mixer of convbert_jax/config/mixers.py that has a causal form. A Transformer of the same shape is
always the other row: SIZE,attention.
"""

import dataclasses

from convbert_jax.config import to_config_dict
from convbert_jax.config.checks.rules import check_choice
from convbert_jax.config.mixers import MIXERS
from convbert_jax.config.sequences import SIZES


def start(recipe: str, variant: str, sizes: tuple[str, ...]):
    """(ConfigDict of the recipe with model and sequence of the variant, its size).

    Raises:
      ConfigError: the variant names no size of `sizes`, or no mixer.
    """
    size, _, mixer = variant.partition(",")
    mixer = mixer or "dynamic"
    check_choice("variant", size, sizes)
    if ":" not in mixer:  # of one's own
        check_choice("variant", mixer, tuple(MIXERS))
    config = to_config_dict()
    config.recipe = recipe
    config.name = f"{recipe.replace('_', '-')}-{size}-{mixer.rpartition(':')[2]}"
    config.variant = variant
    for section, values in zip(("model", "sequence"), SIZES[size](mixer), strict=True):
        config[section].update(dataclasses.asdict(values))
    return config, size
