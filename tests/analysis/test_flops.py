"""FLOPs by formula against the published figures and against XLA's count of one layer."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from convbert_jax.analysis import flops
from convbert_jax.config import Config, ModelSection, TokenizerSection, from_config_dict
from convbert_jax.interop.networks import MODELS
from convbert_jax.models.encoder import Layer
from tests.models.definitions import KINDS


def sized(hidden, embedding, heads, ffn, groups=1, generator=0.25, batch=128, length=128, **model):
    config = Config()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, hidden_size=hidden, embedding_size=embedding, heads=heads, ffn_size=ffn,
            ffn_groups=groups, **model,
        ),
        generator=dataclasses.replace(config.generator, size=generator),
        data=dataclasses.replace(config.data, length=length),
        train=dataclasses.replace(config.train, batch_size=batch, steps=1_000_000),
    )  # fmt: skip


SMALL = dict(hidden=256, embedding=128, heads=4, ffn=1024)
MEDIUM_SMALL = dict(hidden=384, embedding=128, heads=8, ffn=1536, groups=2)
BASE = dict(hidden=768, embedding=768, heads=12, ffn=3072, generator=1 / 3, batch=256)


@pytest.mark.parametrize(
    ("sizes", "length", "millions"),
    [
        (SMALL, 128, 66.9),
        (SMALL, 512, 77.7),
        (MEDIUM_SMALL, 128, 94.8),
        (MEDIUM_SMALL, 512, 108),
        (BASE, 128, 580),
        (BASE, 512, 610),
        (BASE | {"mixer": "attention"}, 128, 611),
        (BASE | {"mixer": "attention"}, 512, 668),
    ],
)
def test_products_per_token(sizes, length, millions):
    per_token = flops.training_flops_per_token(sized(**sizes, length=length))
    assert per_token == pytest.approx(millions * 1e6, rel=0.01)


# What ELECTRA's own counter gives: our sizes, plain attention of these sizes, and ours without
# counting a look-up as a product with a one-hot vector.
TOTALS = [
    (SMALL, 1.258e18, 1.294e18, 7.41e17),
    (MEDIUM_SMALL, 1.567e18, 2.159e18, 1.05e18),
    (BASE, 1.894e19, 1.961e19, 1.27e19),
]


@pytest.mark.parametrize(("sizes", "ours", "plain", "sparse"), TOTALS)
def test_the_convention_of_the_paper(sizes, ours, plain, sparse):
    config = sized(**sizes)
    total = flops.training_flops(config, "paper")
    assert total == pytest.approx(ours, rel=0.01)
    attention = sized(**(sizes | {"mixer": "attention", "groups": 1}))
    assert flops.training_flops(attention, "paper") == pytest.approx(plain, rel=0.01)
    tokens = config.train.steps * config.train.batch_size * config.data.length
    one_hot = 2 * config.model.embedding_size * config.tokenizer.vocab_size
    assert total - 2 * 2 * one_hot * tokens == pytest.approx(sparse, rel=0.01)


@pytest.mark.parametrize(
    ("sizes", "recipe", "steps", "batch", "total"),
    [
        (BASE | {"length": 512}, "replaced_token", 766_000, 256, 6.4245e19),
        (BASE | {"length": 512}, "masked_lm", 1_000_000, 256, 6.4283e19),
        (SMALL, "masked_lm", 1_450_000, 128, 1.419e18),
    ],
    ids=["ELECTRA-base", "BERT-base", "BERT-small"],
)
def test_published_baselines(sizes, recipe, steps, batch, total):
    config = sized(**sizes, mixer="attention")
    train = dataclasses.replace(config.train, steps=steps, batch_size=batch)
    config = dataclasses.replace(config, recipe=recipe, train=train)
    assert flops.training_flops(config, "paper") == pytest.approx(total, rel=0.001)


@pytest.mark.parametrize(
    ("file", "size", "total"),
    [
        ("electra", "small", 1.294e18),
        ("electra", "medium_small", 2.159e18),
        ("electra", "base", 6.4245e19),
        ("bert", "small", 1.419e18),
    ],
)
def test_configs_of_baselines(file, size, total):
    """What ELECTRA's script prints for its sizes; for medium_small by its formulas."""
    module = importlib.import_module(f"configs.{file}")
    config = from_config_dict(module.get_config(size).to_dict())
    assert flops.training_flops(config, "paper") == pytest.approx(total, rel=0.002)


def test_the_pair_of_a_row_is_judged_once():
    config = dataclasses.replace(sized(**SMALL), recipe="masked_lm")
    objective = dataclasses.replace(config.objective, sentence_pairs="next")
    pairs = dataclasses.replace(config, objective=objective)
    more, less = (flops.forward_flops_per_token(c) for c in (pairs, config))
    assert 128 * (more - less) == pytest.approx(2 * 256 * 256 + 2 * 256 * 2)


def test_steps_of_two_kinds_cost_their_mean():
    config = sized(**SMALL)
    objective = dataclasses.replace(config.objective, masked_lm_steps=config.train.steps // 4)
    both = dataclasses.replace(config, objective=objective)
    more = flops.forward_flops_per_token(both) - flops.forward_flops_per_token(config)
    head = 2 * 128 * (256 + 30_522) * 19 / 128
    assert more == pytest.approx((head - 2 * 256 * 257) / 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_xla_counts(kind):
    config = sized(hidden=128, embedding=128, heads=4, ffn=256, **KINDS[kind]).encoder
    layer_config = config.stages[0].layer
    graphdef, params = nnx.split(Layer(layer_config, nnx.Rngs(0)))
    x, ids = jnp.zeros((2, 64, 128)), jnp.ones((2, 64), jnp.int32)
    lowered = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, ids)).lower(params, x)
    counted = lowered.compile().cost_analysis()["flops"] / (2 * 64)
    products = flops._layer_products(layer_config, 64)
    assert products < counted < 1.15 * products  # XLA counts elementwise operations too


@pytest.mark.parametrize("mixer", ["attention", "dynamic", "light"])
def test_an_encoder_decoder_is_what_xla_counts(mixer):
    config = Config(
        recipe="translation",
        model=ModelSection(
            layers=1, hidden_size=128, embedding_size=128, heads=4, ffn_size=256, mixer=mixer,
            kernel_size=5,
        ),
        tokenizer=TokenizerSection(vocab_size=500),
    )  # fmt: skip
    graphdef, params = nnx.split(MODELS["translation"](config, nnx.Rngs(0)))
    source, target = jnp.ones((2, 64), jnp.int32), jnp.ones((2, 32), jnp.int32)
    lowered = jax.jit(
        lambda p: nnx.merge(graphdef, p)(source, source, target, target)
    ).lower(params)  # fmt: skip
    counted = lowered.compile().cost_analysis()["flops"] / 2
    products = flops.pair_forward_flops(config, 64, 32)
    assert products < counted < 1.15 * products
    words = dataclasses.replace(config, tokenizer=TokenizerSection(vocab_size=600))
    more = flops.pair_forward_flops(words, 64, 32) - products
    assert more == 2 * 128 * 100 * 32


def test_a_language_model_is_a_decoder_with_words():
    model = ModelSection(layers=3, hidden_size=64, embedding_size=64, heads=4, ffn_size=128)
    model = dataclasses.replace(model, mixer="attention")
    config = Config(recipe="causal_lm", model=model, tokenizer=TokenizerSection(vocab_size=300))
    layer = 4 * 2 * 64 * 64 + 2 * 2 * 128 * 64 + 2 * 2 * 64 * 128
    assert flops.forward_flops_per_token(config) == 3 * layer + 2 * 64 * 300
    with pytest.raises(ValueError, match="no FLOPs in the paper's convention"):
        flops.forward_flops_per_token(config, "paper")


def test_kinds_of_generator():
    config = sized(**SMALL)

    def cost(**fields):
        generator = dataclasses.replace(config.generator, **fields)
        return flops.forward_flops_per_token(dataclasses.replace(config, generator=generator))

    head = 2 * 128 * (256 + 30_522) * 19 / 128
    assert cost(kind="shared") == pytest.approx(2 * cost(kind="uniform") - 2 * 256 * 257 + head)
    assert cost(kind="uniform") < cost(tie_embeddings=False) < cost(kind="separate")
    alone = flops.forward_flops_per_token(dataclasses.replace(config, recipe="masked_lm"))
    assert alone == pytest.approx(cost(kind="uniform") - 2 * 256 * 257 + head)


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5p", 459e12),
        ("TPU v5", 459e12),
        ("TPU7x", 1153.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla T4", 65e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400 4GB", None),
        ("cpu", None),
        ("NVIDIA GeForce RTX 9090", None),
    ],
)
def test_peak_by_device_kind(device_kind, peak):
    assert flops.peak_flops(device_kind) == peak


def test_unknown_convention():
    with pytest.raises(ValueError, match="convention is 'papers'"):
        flops.forward_flops_per_token(Config(), "papers")
