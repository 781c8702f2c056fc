"""FLOPs by formula against published figures and XLA's count of a layer."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from convbert_jax.analysis import flops
from convbert_jax.config import Config, ModelSection, TokenizerSection, from_config_dict
from convbert_jax.models.encoder import Layer
from convbert_jax.models.networks import MODELS
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
ATTENTION = BASE | {"mixer": "attention"}
HEAD = 2 * 128 * (256 + 30_522) * 19 / 128  # SMALL: 19 of 128 tokens are masked


def test_products_per_token():
    millions = {
        (name, length): flops.training_flops_per_token(sized(**sizes, length=length)) / 1e6
        for name, sizes in {"medium_small": MEDIUM_SMALL, "base": BASE, "bert": ATTENTION}.items()
        for length in (128, 512)
    }
    assert millions == pytest.approx(
        {
            **{("medium_small", 128): 94.8, ("medium_small", 512): 108},
            **{("base", 128): 580, ("base", 512): 610, ("bert", 128): 611, ("bert", 512): 668},
        },
        rel=0.01,
    )


@pytest.mark.parametrize(
    ("sizes", "ours", "plain", "sparse"),
    [
        (SMALL, 1.258e18, 1.294e18, 7.41e17),
        (MEDIUM_SMALL, 1.567e18, 2.159e18, 1.05e18),
        (BASE, 1.894e19, 1.961e19, 1.27e19),
    ],
)
def test_the_convention_of_the_paper(sizes, ours, plain, sparse):
    """Matches ELECTRA's script with our sizes, with its attention sizes, and without lookup FLOPs.

    ELECTRA's script counts an embedding lookup as a product with a one-hot vector.
    """
    config = sized(**sizes)
    total = flops.training_flops(config, "paper")
    attention = sized(**(sizes | {"mixer": "attention", "groups": 1}))
    tokens = config.train.steps * config.train.batch_size * config.data.length
    one_hot = 2 * config.model.embedding_size * config.tokenizer.vocab_size
    found = (total, flops.training_flops(attention, "paper"), total - 2 * 2 * one_hot * tokens)
    assert found == pytest.approx((ours, plain, sparse), rel=0.01)


def test_published_baselines():
    """Values from ELECTRA's script; medium_small from its formulas."""
    for file, size, total in (
        ("electra", "small", 1.294e18),
        ("electra", "medium_small", 2.159e18),
        ("electra", "base", 6.4245e19),
        ("bert", "small", 1.419e18),
    ):
        config = importlib.import_module(f"configs.{file}").get_config(size).to_dict()
        found = flops.training_flops(from_config_dict(config), "paper")
        assert found == pytest.approx(total, rel=0.002), (file, size)
    bert = dataclasses.replace(sized(**ATTENTION, length=512), recipe="masked_lm")
    assert flops.training_flops(bert, "paper") == pytest.approx(6.4283e19, rel=0.001)


def forward(config, **sections) -> float:
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
        if isinstance(fields, dict)
    }
    return flops.forward_flops_per_token(dataclasses.replace(config, **(sections | changed)))


def test_objectives_and_generators():
    config = sized(**SMALL)
    plain = forward(config)
    # pairs are classified once per row
    masked = forward(config, recipe="masked_lm")
    pairs = forward(config, recipe="masked_lm", objective={"sentence_pairs": "next"})
    assert 128 * (pairs - masked) == pytest.approx(2 * 256 * 256 + 2 * 256 * 2)
    # a quarter of the steps is masked LM
    both = forward(config, objective={"masked_lm_steps": config.train.steps // 4})
    assert both - plain == pytest.approx((HEAD - 2 * 256 * 257) / 4)
    uniform = forward(config, generator={"kind": "uniform"})
    shared = forward(config, generator={"kind": "shared"})
    assert shared == pytest.approx(2 * uniform - 2 * 256 * 257 + HEAD)
    assert uniform < forward(config, generator={"tie_embeddings": False}) < plain
    assert masked == pytest.approx(uniform - 2 * 256 * 257 + HEAD)


def test_local_attention_shared_keys_and_gates_by_hand():
    """Four layers of 64 channels, of which the first and third are global."""
    fields = {"mixer": "attention", "key_value_heads": 1, "activation": "geglu"}
    fields |= {"window": 8, "global_every": 2, "layers": 4}
    config = sized(hidden=64, embedding=64, heads=4, ffn=96, length=256, **fields)
    projections = 2 * 64 * (64 + 2 * 16 + 64)  # query, key and value of one head, output
    feed_forward = 3 * 2 * 64 * 96
    keys = 2 * 256 + 2 * (2 * 8 + 1)
    wanted = 4 * (projections + feed_forward) + 2 * 2 * 64 * keys
    assert flops._encoder(config.encoder, 256, paper=False) == wanted


def test_elementwise_operations_of_the_mixed_block_by_hand():
    """One attention and one convolution head of 16 channels, three taps, 32 channels in all."""
    model = ModelSection(layers=1, hidden_size=32, embedding_size=32, heads=2, kernel_size=3)
    mixer = dataclasses.replace(Config(), model=model).encoder.stages[0].layer.mixer
    scores = (1 + 5 + 4) * 64  # scale, softmax and dropout of 64 keys
    biases = 3 * 16  # query, key and value
    filters = (1 + 5) * 3  # bias and softmax of three taps
    convolution = (2 * 3 + 1) * 16  # taps, and the bias of its value
    span = 2 * 3 * 32 + 2 * 16  # depthwise, then bias and product with the query
    assert mixer.elementwise(32, 64) == scores + biases + filters + convolution + span


def test_canon_layers_have_only_elementwise_operations():
    fields = {"mixer": "attention", "key_value_heads": 1, "activation": "geglu"}
    plain, canon = (
        sized(hidden=64, embedding=64, heads=4, ffn=96, length=256, **fields, canon=canon).encoder
        for canon in ("", "ABCD")
    )
    channels = 64 + (64 + 2 * 16) + 64 + 2 * 96
    added = flops._encoder(canon, 256, paper=True) - flops._encoder(plain, 256, paper=True)
    assert added == canon.depth * (2 * 4 + 1) * channels
    assert flops._encoder(canon, 256, paper=False) == flops._encoder(plain, 256, paper=False)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_what_xla_counts(kind):
    config = sized(hidden=128, embedding=128, heads=4, ffn=256, **KINDS[kind]).encoder
    layer = config.stages[0].layer
    graphdef, params = nnx.split(nnx.eval_shape(lambda: Layer(layer, nnx.Rngs(0))))
    x, ids = jnp.zeros((2, 64, 128)), jnp.ones((2, 64), jnp.int32)
    lowered = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x, ids)).lower(params, x)
    counted = lowered.cost_analysis()["flops"] / (2 * 64)
    products = flops._layer_products(layer, 64)
    assert products < counted < 1.05 * products  # XLA counts elementwise operations too


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
    model = nnx.eval_shape(lambda: MODELS["translation"](config, nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    source, target = jnp.ones((2, 64), jnp.int32), jnp.ones((2, 32), jnp.int32)
    lowered = jax.jit(
        lambda p: nnx.merge(graphdef, p)(source, source, target, target)
    ).lower(params)  # fmt: skip
    counted = lowered.cost_analysis()["flops"] / 2
    products = flops.pair_forward_flops(config, 64, 32)
    assert products < counted < 1.15 * products
    words = dataclasses.replace(config, tokenizer=TokenizerSection(vocab_size=600))
    more = flops.pair_forward_flops(words, 64, 32) - products
    assert more == 2 * 128 * 100 * 32


def test_a_language_model_is_a_decoder_with_an_output_layer():
    model = ModelSection(layers=3, hidden_size=64, embedding_size=64, heads=4, ffn_size=128)
    model = dataclasses.replace(model, mixer="attention")
    config = Config(recipe="causal_lm", model=model, tokenizer=TokenizerSection(vocab_size=300))
    layer = 4 * 2 * 64 * 64 + 2 * 2 * 128 * 64 + 2 * 2 * 64 * 128
    assert flops.forward_flops_per_token(config) == 3 * layer + 2 * 64 * 300
    for wrong, convention in ((config, "paper"), (Config(), "papers")):
        with pytest.raises(ValueError):  # noqa: PT011
            flops.forward_flops_per_token(wrong, convention)


def test_peaks_of_devices():
    peaks = {
        **{"TPU v5 lite": 197e12, "TPU v5p": 459e12, "TPU v5": 459e12, "TPU7x": 1153.5e12},
        **{"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H100 NVL": 835e12},
        **{"NVIDIA GH200 480GB": 989e12, "NVIDIA A100-SXM4-40GB": 312e12, "Tesla T4": 65e12},
        **{"NVIDIA L4": 121e12, "NVIDIA L40": 181e12, "NVIDIA L40S": 362e12},
        **{"NVIDIA RTX A1000": None, "NVIDIA T400 4GB": None, "cpu": None},
        "NVIDIA GeForce RTX 9090": None,
    }
    assert {kind: flops.peak_flops(kind) for kind in peaks} == peaks
