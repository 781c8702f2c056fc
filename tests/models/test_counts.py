"""Exact parameter counts of the published sizes, and all parameter paths."""

import importlib

import jax
import pytest

from convbert_jax import config as config_lib
from convbert_jax.models import build, networks

# Encoder with embeddings, discriminator head, generator body, MLM head, total.
COUNTS = {
    "small": (13_143_768, 66_049, 770_988, 39_098, 14_019_903),
    "medium_small": (17_475_888, 148_225, 871_884, 43_194, 18_539_191),
    "base": (105_680_520, 591_361, 9_334_744, 229_434, 115_836_059),
    "large": (322_604_736, 1_050_625, 18_538_160, 295_738, 342_489_259),  # not published
}


def shapes(config):
    _, init = build(networks.PretrainingModel, config)
    return jax.eval_shape(init, jax.random.key(0))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_published_sizes():
    for size, counts in COUNTS.items():
        module = importlib.import_module(f"configs.{size}")
        params = shapes(config_lib.from_config_dict(module.get_config("paper").to_dict()))
        encoder = count(params["embeddings"]) + count(params["discriminator"])
        parts = [count(params[x]) for x in ("discriminator_head", "generator", "generator_head")]
        assert (encoder, *parts, count(params)) == counts, size


# Encoder with embeddings and masked-LM head; 150m and 400m are ModernBERT-base and -large.
MODERN = {
    "17m": 16_913_600,
    "32m": 32_081_344,
    "68m": 68_457_664,
    "150m": 149_655_232,
    "400m": 395_881_664,
    "150m,mixed": 143_785_060,
    "150m,canon": 149_655_232 + 22 * 4 * (768 + 3 * 768 + 768 + 2 * 1_152),
}
LFM2_350M = 354_483_968  # transformers' Lfm2Model


@pytest.mark.parametrize("variant", [*MODERN, "short_350m"])
def test_modern_sizes(variant):
    made = importlib.import_module("configs.modern").get_config(variant)
    config = config_lib.from_config_dict(made.to_dict())
    _, init = build(networks.MaskedLanguageModel, config)
    params = jax.eval_shape(init, jax.random.key(0))
    if variant == "short_350m":
        assert count(params["embeddings"]) + count(params["encoder"]) == LFM2_350M
    else:
        assert count(params) == MODERN[variant]


VOCABULARY, POSITIONS, TYPES = 30_522, 512, 2


def embeddings_on_paper(size):
    return (VOCABULARY + POSITIONS + TYPES) * size + 2 * size  # plus a layer norm


def layers_on_paper(hidden, embedding):
    """Count twelve BERT layers with FFN size 4 * hidden, plus a projection if sizes differ."""
    attention = 4 * (hidden * hidden + hidden)  # query, key, value, output
    feed_forward = hidden * 4 * hidden + 4 * hidden + 4 * hidden * hidden + hidden
    project = (embedding + 1) * hidden if embedding != hidden else 0
    return 12 * (attention + feed_forward + 2 * 2 * hidden) + project


def mlm_head_on_paper(hidden, embedding):
    return (hidden + 1) * embedding + 2 * embedding + VOCABULARY


# Encoder with embeddings (official code); sizes of encoder, embeddings and generator.
BASELINES = {
    ("electra", "small"): (13_483_008, 256, 128, 64),
    ("electra", "small_plus_plus"): (13_483_008, 256, 128, 256),
    ("electra", "medium_small"): (25_315_968, 384, 128, 96),
    ("electra", "base"): (108_891_648, 768, 768, 256),
    ("bert", "small"): (13_483_008, 256, 128, None),
    ("bert", "base"): (108_891_648, 768, 768, None),
    ("bert", "base_512"): (108_891_648, 768, 768, None),
}


@pytest.mark.parametrize(("file", "size"), BASELINES)
def test_baselines(file, size):
    encoder, hidden, embedding, generator = BASELINES[file, size]
    module = importlib.import_module(f"configs.{file}")
    config = config_lib.from_config_dict(module.get_config(size).to_dict())
    _, init = build(networks.MODELS[config.recipe], config)
    params = jax.eval_shape(init, jax.random.key(0))
    assert embeddings_on_paper(embedding) + layers_on_paper(hidden, embedding) == encoder
    trained = encoder
    if file == "electra":
        assert count(params["embeddings"]) + count(params["discriminator"]) == encoder
        trained += hidden * hidden + hidden + hidden + 1  # the discriminator's head
        trained += layers_on_paper(generator, embedding) + mlm_head_on_paper(generator, embedding)
    else:
        assert count(params["embeddings"]) + count(params["encoder"]) == encoder
        trained += mlm_head_on_paper(hidden, embedding)
        if config.objective.sentence_pairs != "none":  # pooler, two logits
            trained += hidden * hidden + hidden + 2 * hidden + 2
    assert count(params) == trained


# Encoder with embeddings. attention: ELECTRA's, ungrouped. bottleneck: a base layer by hand is
# q, k, v 3 * (768 * 384 + 384), output 384 * 768 + 768, feed-forward 4,722,432, norms 3,072.
ABLATIONS = {
    ("small", "attention", 2): 13_483_008,
    ("base", "attention", 2): 108_891_648,
    ("base", "attention", 1): 108_891_648,
    ("small", "bottleneck", 2): 11_905_536,
    ("medium_small", "bottleneck", 2): 14_692_224,
    ("base", "bottleneck", 2): 23_837_184 + 12 * (885_888 + 295_680 + 4_722_432 + 3_072),
    ("base", "bottleneck", 4): 23_837_184 + 12 * (442_944 + 148_224 + 4_722_432 + 3_072),
}


def test_ablations():
    for (size, mixer, head_ratio), expected in ABLATIONS.items():
        config = importlib.import_module(f"configs.{size}").get_config()
        config.model.mixer, config.model.head_ratio = mixer, head_ratio
        config.generator.kind = "uniform"
        params = shapes(config_lib.from_config_dict(config.to_dict()))
        encoder = count(params["embeddings"]) + count(params["discriminator"])
        assert encoder == expected, (size, mixer, head_ratio)


MIXER = ("conv_kernel", "conv_value", "key", "output", "query", "value")
NORM = ("bias", "scale")
DENSE = [*(f"mixer/{name}" for name in MIXER), "feed_forward/intermediate", "feed_forward/output"]
LAYER = {f"{path}/{name}" for path in DENSE for name in ("bias", "kernel")}
LAYER |= {f"mixer/key_conv/{name}" for name in ("bias", "depthwise", "pointwise")}
LAYER |= {f"{norm}/{name}" for norm in ("mixer_norm", "feed_forward_norm") for name in NORM}

OUTSIDE = {
    "discriminator/embeddings_project/bias",
    "discriminator/embeddings_project/kernel",
    "discriminator_head/dense/bias",
    "discriminator_head/dense/kernel",
    "discriminator_head/output/bias",
    "discriminator_head/output/kernel",
    "embeddings/norm/bias",
    "embeddings/norm/scale",
    "embeddings/position/embedding",
    "embeddings/type/embedding",
    "embeddings/word/embedding",
    "generator_head/dense/bias",
    "generator_head/dense/kernel",
    "generator_head/norm/bias",
    "generator_head/norm/scale",
    "generator_head/output_bias",
}


def test_parameter_paths(make_config):
    """Sharding, weight decay, checkpoints and conversion depend on these paths."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes(make_config()))
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    stages = {
        f"{name}/stages/0/{path}" for name in ("discriminator", "generator") for path in LAYER
    }
    assert paths == stages | OUTSIDE  # the generator has 16 channels here and needs no projection
