"""Models that write text: counts on paper, and the two forms, of whole rows and of one position."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ConfigError, MeshSection, ModelSection, StageSection
from convbert_jax.config.sequences import (
    SIZES,
    SequenceSection,
    derive_encoder_decoder,
    derive_language_model,
)
from convbert_jax.models.sequences import sharding_rules
from convbert_jax.models.sequences.networks import EncoderDecoder, LanguageModel
from convbert_jax.models.sequences.tokens import sinusoids
from convbert_jax.training import sharding
from convbert_jax.training.state import flatten

WORDS = 20
SMALL = ModelSection(
    layers=3, hidden_size=32, embedding_size=32, heads=4, mixer="dynamic", kernel_sizes=(3, 5, 5),
    ffn_size=48, positions=16, dropout=0.1, layer_norm_epsilon=1e-5,
)  # fmt: skip
# Every mixer that can be causal, and every choice of the section, in a few models.
FORMS = {
    "light": ({"mixer": "light"}, {"decoder_kernel_sizes": (4, 7)}),
    "dynamic": ({}, {"norm": "pre", "activation": "gelu", "positions": "none"}),
    "attention": ({"mixer": "attention"}, {"positions": "learned", "tied_output": False}),
    "span_dynamic": ({"mixer": "span_dynamic"}, {"decoder_dilations": (1, 2)}),
    "mixed": ({"mixer": "mixed"}, {"norm": "pre", "shared_vocabulary": False}),
    "open": ({}, {"norm": "pre", "last_norm": False}),
    "dilated": (
        {"mixer": "dilated", "mixer_fields": ("glu=false",)},
        {"decoder_dilations": (1, 3)},
    ),
    "T5's layers": (
        {"mixer": "light", "kernel_sizes": (5, 5, 5)},
        {
            "norm": "pre",
            "normalization": "rms",
            "activation": "gated_gelu",
            "biases": False,
            "last_dropout": 0.1,
            "activation_dropout": 0.2,
        },
    ),
    "a Transformer's decoder": ({"mixer": "separable"}, {"decoder_mixer": "attention"}),
    "convolutions and a layer of attention": (
        {
            "mixer": "light",
            "kernel_sizes": (),
            "kernel_size": 3,
            "stages": (StageSection(layers=2), StageSection(mixer="attention")),
        },
        {"norm": "pre", "positions": "none"},
    ),
}
every_form = pytest.mark.parametrize("form", FORMS)


def sections(form):
    model, sequence = FORMS[form]
    return dataclasses.replace(SMALL, **model), SequenceSection(decoder_layers=2, **sequence)


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

# Channels, feed-forward, heads; kernels of the encoder (attention: layers) and of the decoder; gate
SHAPES = {
    "tiny": (128, 256, 4, [7, 7, 7, 7], 4, [7, 7, 7, 7], True),
    "iwslt_de_en": (512, 1024, 4, [3, 7, 15, 31, 31, 31, 31], 6, [3, 7, 15, 31, 31, 31], False),
    "wmt_en_de_big": (1024, 4096, 16, [3, 7, 15, 31, 31, 31, 31], 6, [3, 7, 15, 31, 31, 31], True),
    "t5_base": (768, 3072, 12, [7] * 12, 12, [7] * 12, True),
}
# Source and target words, tables, norms behind pre-norm; and the sum, of attention, light, dynamic.
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
    """Mixer, feed-forward, 2 norms; with a source also attention and a norm."""
    feed_forward = c * f + f + f * c + c
    source = (4 * (c * c + c) + 2 * c) * reads
    return sum(
        mixer_on_paper(mixer, c, h, k, gate) + feed_forward + 4 * c + source for k in kernels
    )


@pytest.mark.parametrize("mixer", ["attention", "light", "dynamic"])
@pytest.mark.parametrize("size", SHAPES)
def test_parameters_of_encoder_decoders(size, mixer):
    c, f, h, encoder, layers, decoder, gate = SHAPES[size]
    source, target, tables, norms, sums = WHOLE[size]
    config = derive_encoder_decoder(*SIZES[size](mixer), source, target)
    if mixer == "attention":
        encoder = [0] * layers
    words = source if tables == 1 else source + 2 * target
    wanted = words * c + norms * 2 * c
    wanted += stack_on_paper(mixer, c, f, h, encoder, gate, reads=False)
    wanted += stack_on_paper(mixer, c, f, h, decoder, gate, reads=True)
    assert count(shapes_of(lambda rngs: EncoderDecoder(config, rngs))) == wanted
    if sums is not None:
        assert wanted == sums[("attention", "light", "dynamic").index(mixer)]


@pytest.mark.parametrize("mixer", ["attention", "light", "dynamic"])
def test_parameters_of_a_language_model(mixer):
    config = derive_language_model(*SIZES["lm"](mixer), 50_000)
    wanted = 50_000 * 512 + 2 * 512
    wanted += stack_on_paper(mixer, 512, 2048, 8, [3, 7, 15, 31, 31, 31], True, reads=False)
    assert count(shapes_of(lambda rngs: LanguageModel(config, rngs))) == wanted


def test_the_published_size_of_pretrained_light_convolution():
    """210 million (Tay et al. 2021, the base model of the released checkpoints), by LightConv's own
    block; that of the released code has a dense layer more.
    """
    config = derive_encoder_decoder(*SIZES["t5_base"]("light"), 32_128, 32_128)
    assert count(shapes_of(lambda rngs: EncoderDecoder(config, rngs))) == pytest.approx(
        210e6, rel=0.01
    )


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


@pytest.fixture(scope="module")
def models(randomize):
    """models(form) -> (graphdef, params) of a translator and of a language model."""

    @functools.cache
    def make(form):
        return tuple(
            randomize(functools.partial(cls, config), scale=0.1)
            for cls, config in (
                (EncoderDecoder, translator(form)),
                (LanguageModel, writer(form)),
            )
        )

    return make


@every_form
def test_a_translator_step_by_step_is_what_it_is_as_a_whole(models, form):
    """Two rows of the target for each of the source, which has padding."""
    (graphdef, params), _ = models(form)
    source, tokens = draw(0, 2, SOURCE), draw(1, 4, LENGTH)

    @jax.jit
    def both(params, source, tokens):
        model = nnx.merge(graphdef, params)
        twice = [jnp.repeat(x, 2, axis=0) for x in (source, SOURCE_IDS)]
        whole = model(*twice, tokens, jnp.ones_like(tokens))
        state, read = model.start(source, SOURCE_IDS, copies=2, length=LENGTH)

        def step(state, given):
            logits, state = model.step(given[1], state, given[0], read)
            return state, logits

        _, steps = jax.lax.scan(step, state, (jnp.arange(LENGTH), tokens.T))
        return whole, steps.swapaxes(0, 1)

    whole, steps = both(params, source, tokens)
    assert whole.dtype == jnp.float32
    assert np.std(whole) > 0.05
    np.testing.assert_allclose(steps, whole, atol=1e-5)


@every_form
def test_a_language_model_step_by_step_is_what_it_is_as_a_whole(models, form):
    _, (graphdef, params) = models(form)

    @jax.jit
    def both(params, tokens):
        model = nnx.merge(graphdef, params)
        state, read = model.start(tokens[:, :1], copies=1, length=LENGTH)

        def step(state, given):
            logits, state = model.step(given[1], state, given[0], read)
            return state, logits

        _, steps = jax.lax.scan(step, state, (jnp.arange(LENGTH), tokens.T))
        return model(tokens, jnp.ones_like(tokens)), steps.swapaxes(0, 1)

    whole, steps = both(params, draw(2, 3, LENGTH))
    np.testing.assert_allclose(steps, whole, atol=1e-5)


@every_form
def test_packed_pairs_are_what_they_are_alone_and_the_future_is_not_read(models, form):
    (graphdef, params), _ = models(form)
    source, tokens = draw(3, 1, SOURCE), draw(4, 1, LENGTH)

    @jax.jit
    def run(source, source_ids, tokens, ids):
        return nnx.merge(graphdef, params)(source, source_ids, tokens, ids)

    source_ids = jnp.asarray([[1] * 3 + [2] * 3 + [0]])
    ids = jnp.asarray([[1] * 4 + [2] * 4 + [0]])
    packed = run(source, source_ids, tokens, ids)
    alone = run(
        jnp.pad(source[:, 3:6], ((0, 0), (0, 4))), jnp.asarray([[1] * 3 + [0] * 4]),
        jnp.pad(tokens[:, 4:8], ((0, 0), (0, 5))), jnp.asarray([[1] * 4 + [0] * 5]),
    )  # fmt: skip
    np.testing.assert_allclose(packed[:, 4:8], alone[:, :4], atol=1e-5)
    changed = run(source, source_ids, tokens.at[:, 6:].set((tokens[:, 6:] + 1) % (WORDS - 3)), ids)
    np.testing.assert_allclose(changed[:, :6], packed[:, :6], atol=1e-5)
    assert np.abs(changed[:, 6] - packed[:, 6]).max() > 1e-3
    other = run(source.at[:, :3].add(1), source_ids, tokens, ids)
    np.testing.assert_allclose(other[:, 4:8], packed[:, 4:8], atol=1e-5)
    assert np.abs(other[:, :4] - packed[:, :4]).max() > 1e-3


@every_form
def test_every_parameter_has_a_place_on_a_mesh(models, form):
    (_, params), (_, of_writer) = models(form)
    mesh = sharding.make_mesh(MeshSection(fsdp=2, tensor=2))
    for config, tree in ((translator(form), params), (writer(form), of_writer)):
        rules = (*sharding_rules(config), *sharding.RULES)
        for path, leaf in flatten(tree).items():
            sharding.partition_spec(path, leaf.shape, mesh, rules)


@pytest.mark.parametrize("form", ["dynamic", "attention"])
def test_every_parameter_has_a_gradient_that_remat_leaves_as_it_is(models, form):
    (graphdef, params), _ = models(form)
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
    for (path, leaf), other in zip(flatten(whole).items(), flatten(again).values(), strict=True):
        assert np.abs(leaf).max() > 0 or path.endswith("key/bias"), path
        np.testing.assert_allclose(leaf, other, atol=2e-4)


def test_attention_to_the_source_is_divided_by_heads():
    rules = (*sharding_rules(translator("light")), *sharding.RULES)
    mesh = sharding.make_mesh(MeshSection(fsdp=2, tensor=2))
    spec = functools.partial(sharding.partition_spec, mesh=mesh, rules=rules)
    into = spec("decoder/stages/0/source/query/kernel", (1, 256, 256))
    out = spec("decoder/stages/0/source/output/kernel", (1, 256, 256))
    assert into == jax.P(None, "fsdp", "tensor")
    assert out == jax.P(None, "tensor", "fsdp")


@pytest.mark.parametrize("size", [6, 7])
def test_sinusoids(size):
    """Place 0 is position 2; sines, then cosines; the slowest wave is 10,000 times the fastest."""
    waves = [1, 100**-1, 10_000**-1]
    rows = [
        [np.sin(p * w) for w in waves] + [np.cos(p * w) for w in waves] + [0] * (size - 6)
        for p in (2, 3, 9)
    ]
    np.testing.assert_allclose(sinusoids(jnp.asarray([0, 1, 7]), size), rows, atol=1e-6)


# --- Faults ---


def test_rows_longer_than_the_table_of_positions(models):
    (graphdef, params), (lm_graphdef, lm_params) = models("attention")
    model, lm = nnx.merge(graphdef, params), nnx.merge(lm_graphdef, lm_params)
    long = draw(0, 1, 17)
    ones = jnp.ones_like(long)
    with pytest.raises(ValueError, match="Rows of 17 tokens are longer than the position table"):
        model(long, ones, long[:, :3], ones[:, :3])
    with pytest.raises(ValueError, match=r"Rows of 17 tokens .* config.sequence.positions=sinus"):
        model.start(long[:, :3], ones[:, :3], copies=1, length=17)
    with pytest.raises(ValueError, match="Rows of 17 tokens"):
        lm.start(long[:, :16], copies=1, length=17)


@pytest.mark.parametrize(
    ("model", "sequence", "says"),
    [
        ({}, {}, "20 words in the source's vocabulary and 17 in the target's"),
        ({"embedding_size": 16}, {"shared_vocabulary": False}, "embedding_size=16 is not config.m"),
        (
            {"mixer": "tests.models.mean_mixer:Mean"},
            {"shared_vocabulary": False},
            r"config\.model\.mixer=tests.models.mean_mixer:Mean has no causal form",
        ),
        (
            {},
            {"shared_vocabulary": False, "decoder_mixer": "tests.models.mean_mixer:Mean"},
            r"config\.sequence\.decoder_mixer=tests.models.mean_mixer:Mean has no causal form",
        ),
    ],
)
def test_faults_are_one_sentence(model, sequence, says):
    model = dataclasses.replace(SMALL, **model)
    with pytest.raises(ConfigError, match=says) as error:
        derive_encoder_decoder(model, SequenceSection(**sequence), WORDS, WORDS - 3)
    assert "\n" not in str(error.value)


def test_a_head_ratio_is_of_the_mixer_beside_it():
    """One of a mixed encoder was refused where the decoder has attention."""
    model = dataclasses.replace(SMALL, mixer="mixed", head_ratio=4)
    found = derive_encoder_decoder(model, SequenceSection(decoder_mixer="attention"), WORDS, WORDS)
    assert found.encoder.stages[0].layer.mixer.attention_heads == 1
    assert found.decoder.stages[0].layer.mixer.attention_heads == 4
