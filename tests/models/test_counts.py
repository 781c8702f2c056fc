"""Exact parameter counts of the published sizes, and the names of all parameters."""

import importlib

import jax
import pytest

from convbert_jax import config as config_lib
from convbert_jax.models import pretraining
from convbert_jax.models.build import build

# Encoder with embeddings, discriminator head, generator body, MLM head, all together.
COUNTS = {
    "small": (13_143_768, 66_049, 770_988, 39_098, 14_019_903),
    "medium_small": (17_475_888, 148_225, 871_884, 43_194, 18_539_191),
    "base": (105_680_520, 591_361, 9_334_744, 229_434, 115_836_059),
}


def shapes(config):
    _, init = build(pretraining.PretrainingModel, config)
    return jax.eval_shape(init, jax.random.key(0))


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("size", COUNTS)
def test_published_sizes(size):
    module = importlib.import_module(f"configs.{size}")
    params = shapes(config_lib.from_config_dict(module.get_config("paper").to_dict()))
    encoder = count(params["embeddings"]) + count(params["discriminator"])
    parts = [count(params[x]) for x in ("discriminator_head", "generator", "generator_head")]
    assert (encoder, *parts, count(params)) == COUNTS[size]


# Encoder with embeddings. attention: papers.md 1.5, ungrouped; bottleneck, a layer of base by hand:
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


@pytest.mark.parametrize(("size", "mixer", "head_ratio"), ABLATIONS)
def test_ablations(size, mixer, head_ratio):
    config = importlib.import_module(f"configs.{size}").get_config()
    config.model.mixer, config.model.head_ratio = mixer, head_ratio
    config.generator.kind = "uniform"
    params = shapes(config_lib.from_config_dict(config.to_dict()))
    encoder = count(params["embeddings"]) + count(params["discriminator"])
    assert encoder == ABLATIONS[size, mixer, head_ratio]


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
    """Sharding, decay, checkpoints and conversion know parameters by these names."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes(make_config()))
    paths = {jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves}
    stages = {
        f"{name}/stages/0/{path}" for name in ("discriminator", "generator") for path in LAYER
    }
    assert paths == stages | OUTSIDE  # the generator, 16 wide here, needs no projection
