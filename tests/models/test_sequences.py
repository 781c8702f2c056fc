"""Sequence-to-sequence and language models: parameter counts, full-sequence and one-step forms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.written import SIZES
from convbert_jax.config import ConfigError, MeshSection, ModelSection, StageSection
from convbert_jax.config.network import derive_encoder_decoder, derive_language_model
from convbert_jax.config.sequences import SequenceSection
from convbert_jax.models.embeddings import sinusoids
from convbert_jax.models.encoder import FeedForward
from convbert_jax.models.layers import Canons, initializers
from convbert_jax.models.networks import EncoderDecoder, LanguageModel, sharding_rules
from convbert_jax.training import partitioning
from convbert_jax.training.partitioning import flatten_params
from tests.refusals import refused

WORDS = 20
SMALL = ModelSection(
    layers=3, hidden_size=32, embedding_size=32, heads=4, mixer="dynamic", kernel_sizes=(3, 5, 5),
    ffn_size=48, activation="relu", position_embedding="sinusoidal", positions=16, dropout=0.1,
    layer_norm_epsilon=1e-5,
)  # fmt: skip
# Every option of the section in a few models; test_mixers.py tests the mixers alone.
FORMS = {
    "light": ({"mixer": "light"}, {"decoder_kernel_sizes": (4, 7)}),
    "dynamic": (
        {"norm": "pre", "activation": "gelu", "position_embedding": "none"},
        {"last_norm": False},
    ),
    "attention": (
        {"mixer": "attention", "position_embedding": "learned", "canon": "BD"},
        {"tied_output": False},
    ),
    "mixed": ({"mixer": "mixed", "norm": "pre"}, {"shared_vocabulary": False}),
    "dilated": (
        {"mixer": "dilated", "mixer_fields": ("glu=false",)},
        {"decoder_dilations": (1, 3)},
    ),
    "T5's layers": (
        {
            "mixer": "light",
            "kernel_sizes": (5, 5, 5),
            "norm": "pre",
            "normalization": "rms",
            "activation": "gated_gelu",
            "biases": False,
            "last_dropout": 0.1,
            "activation_dropout": 0.2,
            "canon": "ACD",
        },
        {},
    ),
    "modern attention": (
        {
            "mixer": "attention",
            "kernel_sizes": (),
            "layers": 5,
            "norm": "pre",
            "activation": "geglu",
            "biases": False,
            "qk_norm": True,
            "key_value_heads": 2,
            "window": 2,
            "global_every": 2,
            "position_embedding": "rotary",
            "local_rotary_base": 100.0,
            "canon": "ABCD",
        },
        {"decoder_layers": 4},
    ),
    "modern mixed": (
        {
            "mixer": "mixed",
            "kernel_sizes": (),
            "kernel_size": 3,
            "norm": "pre",
            "normalization": "rms",
            "activation": "swiglu",
            "biases": False,
            "qk_norm": True,
            "window": 2,
            "position_embedding": "rotary",
            "canon": "B",
        },
        {},
    ),
    "several mixers": (
        {
            "mixer": "separable",
            "kernel_sizes": (),
            "kernel_size": 3,
            "stages": (StageSection(layers=2), StageSection(mixer="attention")),
            "norm": "pre",
            "position_embedding": "none",
        },
        {"decoder_mixer": "attention"},
    ),
}


def sections(form):
    model, sequence = FORMS[form]
    return dataclasses.replace(SMALL, **model), SequenceSection(**{"decoder_layers": 2} | sequence)


@functools.cache
def translator(form):
    model, sequence = sections(form)
    target = WORDS if sequence.shared_vocabulary else WORDS - 3
    return derive_encoder_decoder(model, sequence, WORDS, target)


@functools.cache
def writer(form):
    return derive_language_model(*sections(form), WORDS)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, WORDS - 3, shape), jnp.int32)


def count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(tree, nnx.Param)))


def shapes_of(build):
    return nnx.eval_shape(lambda: build(nnx.Rngs(0)))


# --- Sizes ---

# Channels, FFN size, heads; encoder kernels (attention: layers), decoder kernels; gate.
SHAPES = {
    "tiny": (128, 256, 4, [7, 7, 7, 7], 4, [7, 7, 7, 7], True),
    "iwslt_de_en": (512, 1024, 4, [3, 7, 15, 31, 31, 31, 31], 6, [3, 7, 15, 31, 31, 31], False),
    "wmt_en_de_big": (1024, 4096, 16, [3, 7, 15, 31, 31, 31, 31], 6, [3, 7, 15, 31, 31, 31], True),
    "t5_base": (768, 3072, 12, [7] * 12, 12, [7] * 12, True),
}
# Source and target words, tables, final norms of pre-norm; totals for attention, light, dynamic.
WHOLE = {
    "tiny": (8_000, 8_000, 1, 2, (2_349_568, 2_217_696, 2_246_144)),
    "iwslt_de_en": (8_848, 6_632, 3, 0, None),
    "wmt_en_de_big": (32_768, 32_768, 1, 0, (209_911_808, 208_867_504, 213_237_760)),
    "t5_base": (32_128, 32_128, 1, 2, None),
}


def mixer_on_paper(mixer, c, h, k, gate):
    dense = c * c + c
    return {
        "attention": 4 * dense,
        "light": (2 + gate) * dense + h * k,
        "dynamic": (2 + gate) * dense + c * h * k,
    }[mixer]


def stack_on_paper(mixer, c, f, h, kernels, gate, reads):
    """Count mixer, feed-forward and 2 norms; a decoder adds cross-attention and a norm."""
    feed_forward = c * f + f + f * c + c
    source = (4 * (c * c + c) + 2 * c) * reads
    return sum(
        mixer_on_paper(mixer, c, h, k, gate) + feed_forward + 4 * c + source for k in kernels
    )


MIXERS = ("attention", "light", "dynamic")


@pytest.mark.parametrize("size", SHAPES)
def test_parameters_of_encoder_decoders(size):
    c, f, h, kernels, layers, decoder, gate = SHAPES[size]
    source, target, tables, norms, sums = WHOLE[size]
    for number, mixer in enumerate(MIXERS):
        config = derive_encoder_decoder(*SIZES[size](mixer), source, target)
        encoder = [0] * layers if mixer == "attention" else kernels
        words = source if tables == 1 else source + 2 * target
        wanted = words * c + norms * 2 * c
        wanted += stack_on_paper(mixer, c, f, h, encoder, gate, reads=False)
        wanted += stack_on_paper(mixer, c, f, h, decoder, gate, reads=True)
        found = count(shapes_of(functools.partial(EncoderDecoder, config)))
        assert found == wanted, mixer
        assert sums is None or found == sums[number]
        if (size, mixer) == ("t5_base", "light"):
            # Tay et al. 2021 report 210 million for their base model. This is LightConv's block;
            # the block of their released code has one more dense layer.
            assert found == pytest.approx(210e6, rel=0.01)


def test_parameters_of_language_models():
    for mixer in MIXERS:
        config = derive_language_model(*SIZES["lm"](mixer), 50_000)
        wanted = 50_000 * 512 + 2 * 512
        wanted += stack_on_paper(mixer, 512, 2048, 8, [3, 7, 15, 31, 31, 31], True, reads=False)
        assert count(shapes_of(functools.partial(LanguageModel, config))) == wanted, mixer


def test_the_sizes_are_what_the_published_code_says():
    model, sequence = SIZES["iwslt_de_en"]("dynamic")
    config = derive_encoder_decoder(model, sequence, 8_848, 6_632)
    kernels = [
        stage.layer.mixer.kernel_size
        for part in (config.encoder, config.decoder)
        for stage in part.stages
        for _ in range(stage.depth)
    ]
    assert kernels == [3, 7, 15, 31, 31, 31, 31, 3, 7, 15, 31, 31, 31]
    layer = config.decoder.stages[0].layer
    assert (layer.norm, layer.activation, layer.dropout) == ("post", "relu", 0.3)
    assert not layer.mixer.glu
    assert layer.mixer.attention_dropout == 0.1


# --- Two forms ---

LENGTH, SOURCE = 9, 7
SOURCE_IDS = jnp.asarray([[1] * 7, [1] * 4 + [0] * 3])


@pytest.mark.parametrize("form", FORMS)
def test_a_translator_step_by_step_is_what_it_is_as_a_whole(randomize, form):
    """Packed pairs equal separate pairs; no position reads the future or another pair's source.

    Each source has two targets, and one source has padding.
    """
    config = translator(form)
    graphdef, params = randomize(functools.partial(EncoderDecoder, config), scale=0.1)
    source, tokens = draw(0, 2, SOURCE), draw(1, 4, LENGTH)
    pair_source, pair = draw(3, SOURCE), draw(4, LENGTH)
    pair_source_ids, pair_ids = [1] * 3 + [2] * 3 + [0], [1] * 4 + [2] * 4 + [0]
    second_source, second = np.pad(pair_source[3:6], (0, 4)), np.pad(pair[4:8], (0, 5))
    future = pair.at[6:].set((pair[6:] + 1) % (WORDS - 3))
    packed = [
        (pair_source, pair_source_ids, pair, pair_ids),
        (second_source, np.arange(SOURCE) < 3, second, np.arange(LENGTH) < 4),
        (pair_source, pair_source_ids, future, pair_ids),
        (pair_source.at[:3].add(1), pair_source_ids, pair, pair_ids),
    ]
    beams = [jnp.repeat(x, 2, axis=0) for x in (source, SOURCE_IDS)]
    rows = [
        jnp.concatenate([one, jnp.stack([jnp.asarray(x, jnp.int32) for x in others])])
        for one, others in zip(
            (*beams, tokens, jnp.ones_like(tokens)), zip(*packed, strict=True), strict=True
        )
    ]

    @jax.jit
    def both(params):
        model = nnx.merge(graphdef, params)
        state, read = model.start(source, SOURCE_IDS, copies=2, length=LENGTH)

        def step(state, given):
            logits, state = model.step(given[1], state, given[0], read)
            return state, logits

        _, steps = jax.lax.scan(step, state, (jnp.arange(LENGTH), tokens.T))
        return model(*rows), steps.swapaxes(0, 1)

    whole, steps = both(params)
    assert whole.dtype == jnp.float32
    assert np.std(whole) > 0.05
    np.testing.assert_allclose(steps, whole[:4], atol=1e-5)
    packed, alone, future, other = whole[4:]
    np.testing.assert_allclose(packed[4:8], alone[:4], atol=1e-5)
    np.testing.assert_allclose(future[:6], packed[:6], atol=1e-5)
    assert np.abs(future[6] - packed[6]).max() > 1e-3
    np.testing.assert_allclose(other[4:8], packed[4:8], atol=1e-5)
    assert np.abs(other[:4] - packed[:4]).max() > 1e-3

    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    rules = (*sharding_rules(config), *partitioning.RULES)
    for path, leaf in flatten_params(params).items():
        partitioning.partition_spec(path, leaf.shape, mesh, rules)


@pytest.mark.parametrize(
    ("form", "begun"), [("light", 1), ("attention", 3), ("modern mixed", 3), ("T5's layers", 3)]
)
def test_a_language_model_step_by_step_is_what_it_is_as_a_whole(randomize, form, begun):
    """Prompts have up to `begun` tokens; shorter prompts are padded on the left."""
    config = writer(form)
    graphdef, params = randomize(functools.partial(LanguageModel, config), scale=0.1)
    tokens, first = draw(2, 3, LENGTH), np.asarray([0, begun - 1, begun // 2])
    rows = np.stack([np.roll(row, -by) for row, by in zip(tokens, first, strict=True)])
    ids = jnp.asarray(np.arange(LENGTH) < LENGTH - first[:, None], jnp.int32)

    @jax.jit
    def both(params):
        model = nnx.merge(graphdef, params)
        state, read = model.start(tokens[:, :begun], jnp.asarray(first), copies=1, length=LENGTH)

        def step(state, given):
            logits, state = model.step(given[1], state, given[0], read)
            return state, logits

        places = jnp.arange(begun - 1, LENGTH)
        _, steps = jax.lax.scan(step, state, (places, tokens[:, begun - 1 :].T))
        return model(rows, ids), steps.swapaxes(0, 1)

    whole, steps = both(params)
    for row, by in enumerate(first):
        wanted = whole[row, begun - 1 - by : LENGTH - by]
        np.testing.assert_allclose(steps[row], wanted, atol=1e-5)
    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    rules = (*sharding_rules(config), *partitioning.RULES)
    for path, leaf in flatten_params(params).items():
        partitioning.partition_spec(path, leaf.shape, mesh, rules)


def test_every_parameter_has_a_gradient_that_remat_leaves_as_it_is(randomize):
    model = dataclasses.replace(SMALL, layers=1, mixer="light", kernel_sizes=())
    config = derive_encoder_decoder(model, SequenceSection(decoder_layers=1), WORDS, WORDS)
    graphdef, params = randomize(functools.partial(EncoderDecoder, config), scale=0.1)
    source, tokens = draw(5, 2, SOURCE), draw(6, 2, LENGTH)

    @functools.partial(jax.jit, static_argnames=("remat",))
    def gradients(params, remat):
        def loss(params):
            model = nnx.merge(graphdef, params)
            model.encoder.config = dataclasses.replace(model.encoder.config, remat=remat)
            model.decoder.config = dataclasses.replace(model.decoder.config, remat=remat)
            ids = jnp.ones_like(tokens)
            logits = model(source, SOURCE_IDS, tokens, ids, key=jax.random.key(0))
            return jnp.sum(jax.nn.log_softmax(logits)[..., 3])

        return jax.grad(loss)(params)

    whole, again = gradients(params, "none"), gradients(params, "full")
    for (path, leaf), other in zip(
        flatten_params(whole).items(), flatten_params(again).values(), strict=True
    ):
        assert np.abs(leaf).max() > 0 or path.endswith("key/bias"), path
        np.testing.assert_allclose(leaf, other, atol=2e-4)


def test_attention_to_the_source_is_divided_by_heads():
    rules = (*sharding_rules(translator("light")), *partitioning.RULES)
    mesh = partitioning.make_mesh(MeshSection(fsdp=2, tensor=2))
    spec = functools.partial(partitioning.partition_spec, mesh=mesh, rules=rules)
    into = spec("decoder/stages/0/source/query/kernel", (1, 256, 256))
    out = spec("decoder/stages/0/source/output/kernel", (1, 256, 256))
    assert into == jax.P(None, "fsdp", "tensor")
    assert out == jax.P(None, "tensor", "fsdp")


@pytest.mark.parametrize("size", [6, 7])
def test_sinusoids(size):
    """Index 0 is position 2; sines, then cosines; wavelengths span a factor of 10,000."""
    waves = [1, 100**-1, 10_000**-1]
    rows = [
        [np.sin(p * w) for w in waves] + [np.cos(p * w) for w in waves] + [0] * (size - 6)
        for p in (2, 3, 9)
    ]
    np.testing.assert_allclose(sinusoids(jnp.asarray([0, 1, 7]), size), rows, atol=1e-6)


# --- Layers of T5 and of Tay et al. 2021: gates, more dropout, one attention layer ---


@pytest.mark.parametrize(("attends", "reach"), [(False, 3), (True, LENGTH)])
def test_one_layer_of_attention_in_a_convolutional_encoder_reads_the_whole_source(
    randomize, attends, reach
):
    """Three layers of kernel size 3 reach three positions; one attention layer reaches all.

    Architecture of Tay et al. 2021.
    """
    stages = (StageSection(layers=2, mixer="light"), StageSection(mixer="attention"))
    fields = {"mixer": "light", "kernel_sizes": (), "kernel_size": 3}
    fields |= {"norm": "pre", "position_embedding": "none"}
    model = dataclasses.replace(SMALL, **fields, stages=stages if attends else ())
    sequence = SequenceSection(decoder_layers=2)
    config = derive_encoder_decoder(model, sequence, WORDS, WORDS)
    assert [type(stage.layer.mixer).__name__ for stage in config.decoder.stages] == ["Light"]
    graphdef, params = randomize(functools.partial(EncoderDecoder, config), scale=0.1)
    source = draw(0, 1, LENGTH)
    changed = source.at[0, 0].set((source[0, 0] + 1) % (WORDS - 3))
    ids = jnp.ones((2, LENGTH), jnp.int32)
    run = jax.jit(lambda source: nnx.merge(graphdef, params).encode(source, ids))
    one, other = run(jnp.concatenate([source, changed]))
    moved = np.abs(one - other).max(axis=-1)
    np.testing.assert_array_equal(moved > 1e-7, np.arange(LENGTH) <= reach)


@pytest.mark.parametrize("field", ["activation_dropout", "last_dropout"])
def test_each_dropout_of_t5_is_where_it_says(randomize, field):
    """Needs a key. Dropout after the last norm sets whole channels of the output to 0."""
    model, sequence = sections("T5's layers")
    none = {"activation_dropout": 0.0, "last_dropout": 0.0}
    model = dataclasses.replace(model, dropout=0.0, attention_dropout=0.0, **none | {field: 0.5})
    config = derive_encoder_decoder(model, sequence, WORDS, WORDS)
    graphdef, params = randomize(functools.partial(EncoderDecoder, config), scale=0.1)
    source, ids = draw(0, 2, LENGTH), jnp.ones((2, LENGTH), int)

    @jax.jit
    def run(params, key):
        net = nnx.merge(graphdef, params)
        keys = (None, key)
        encoded = [net.encode(source, ids, key=key) for key in keys]
        return *encoded, *(net(source, ids, source, ids, key=key) for key in keys)

    plain, dropped, words, words_dropped = run(params, jax.random.key(0))
    gone = float((dropped == 0).mean())
    assert gone == pytest.approx(0.5, abs=0.1) if field == "last_dropout" else gone == 0
    assert np.abs(dropped - plain).max() > 1e-3
    assert np.abs(words_dropped - words).max() > 1e-3


def test_a_gated_block_multiplies_two_dense_layers():
    config = translator("T5's layers").encoder.stages[0].layer
    block = FeedForward(config, initializers("glorot", 0.02), nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 4, 32))
    first, gate, last = (getattr(block, n).kernel[...] for n in ("intermediate", "gate", "output"))
    wanted = (jax.nn.gelu(x @ first, approximate=True) * (x @ gate)) @ last
    np.testing.assert_allclose(block(x, Canons()), wanted, atol=1e-5)


# --- Errors ---


def test_rows_longer_than_the_table_of_positions_are_refused(randomize):
    model = nnx.merge(*randomize(functools.partial(EncoderDecoder, translator("attention"))))
    lm = nnx.merge(*randomize(functools.partial(LanguageModel, writer("attention"))))
    long = draw(0, 1, 17)
    ones = jnp.ones_like(long)
    for run in (
        lambda: model(long, ones, long[:, :3], ones[:, :3]),
        lambda: model.start(long[:, :3], ones[:, :3], copies=1, length=17),
        lambda: lm.start(long[:, :16], copies=1, length=17),
    ):
        with refused(ValueError, 17, 16, "config.model.position_embedding"):
            jax.eval_shape(run)
    jax.eval_shape(lambda: lm.start(long[:, :15], copies=1, length=17))


MEAN = "tests.models.mean_mixer:Mean"


@pytest.mark.parametrize(
    ("model", "sequence", "mentions"),
    [
        ({}, {}, [20, 17]),
        ({"embedding_size": 16}, {"shared_vocabulary": False}, ["embedding_size=16"]),
        ({"mixer": MEAN}, {"shared_vocabulary": False}, [f"config.model.mixer={MEAN}"]),
        (
            {},
            {"shared_vocabulary": False, "decoder_mixer": MEAN},
            [f"config.sequence.decoder_mixer={MEAN}"],
        ),
    ],
)
def test_faults_are_one_sentence(model, sequence, mentions):
    model = dataclasses.replace(SMALL, **model)
    with refused(ConfigError, *mentions) as error:
        derive_encoder_decoder(model, SequenceSection(**sequence), WORDS, WORDS - 3)
    assert "\n" not in str(error.value)


def test_a_head_ratio_is_of_the_mixer_beside_it():
    model = dataclasses.replace(SMALL, mixer="mixed", head_ratio=4)
    found = derive_encoder_decoder(model, SequenceSection(decoder_mixer="attention"), WORDS, WORDS)
    assert found.encoder.stages[0].layer.mixer.attention_heads == 1
    assert found.decoder.stages[0].layer.mixer.attention_heads == 4
