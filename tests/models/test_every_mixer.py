"""What holds for every mixer of the package, by being in the table; see definitions.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import ConfigError, MeshSection, StageConfig, from_config_dict, to_dict
from convbert_jax.config.mixers import MIXERS
from convbert_jax.interop import matching, networks, sources
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import initializers
from convbert_jax.models.mixers import sharding_rules
from convbert_jax.training import sharding
from tests.agreement import assert_agree
from tests.models.definitions import COUNTS, DEFINITIONS, KINDS

OWN = ("mixer", "mixer_fields", "kernel_size", "dilation", "heads", "head_ratio")
every_kind = pytest.mark.parametrize("kind", KINDS)
every_mixer = pytest.mark.parametrize("mixer", MIXERS)


def mixer_of(config):
    return config.encoder.stages[0].layer.mixer


def module_of(mixer, rngs):
    return mixer.module(32, initializers("release", 0.02), rngs)


def states(dtype=jnp.float32):
    return jax.random.normal(jax.random.key(1), (2, 24, 32)).astype(dtype)


@every_kind
def test_is_its_definition(make_config, randomize, packed, kind):
    mixer = mixer_of(make_config(**KINDS[kind]))
    graphdef, params = randomize(functools.partial(module_of, mixer))
    out = jax.jit(lambda x: nnx.merge(graphdef, params)(x, packed))(states())
    exact = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    define = DEFINITIONS[KINDS[kind]["mixer"]]
    wanted = define(exact, np.asarray(states(), np.float64), np.asarray(packed), mixer)
    real = np.asarray(packed != 0)
    np.testing.assert_allclose(out[real], wanted[real], atol=2e-5)


@every_kind
@pytest.mark.parametrize(("channels", "heads"), [(64, 4), (768, 12)])
def test_has_the_parameters_of_its_formula(make_config, kind, channels, heads):
    config = make_config(hidden_size=channels, embedding_size=16, heads=heads, **KINDS[kind])
    mixer = mixer_of(config)
    state = nnx.eval_shape(
        lambda: mixer.module(channels, initializers("release", 0.02), nnx.Rngs(0))
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(state, nnx.Param)))
    assert count == COUNTS[kind](channels, heads, config.model.kernel_size)


@every_kind
def test_bfloat16_is_close_and_its_gradients_are_whole(make_config, randomize, packed, kind):
    mixer = mixer_of(make_config(**KINDS[kind]))
    graphdef, params = randomize(functools.partial(module_of, mixer))

    @jax.jit
    def run(params, x):
        return nnx.merge(graphdef, params)(x, packed)

    rounded = run(params, states(jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    real = np.asarray(packed != 0)
    exact = run(params, states())
    scale = np.abs(exact[real]).max()
    np.testing.assert_allclose(
        rounded.astype(jnp.float32)[real], exact[real], atol=0.03 * float(scale)
    )
    gradients = jax.eval_shape(
        jax.grad(lambda p: run(p, states(jnp.bfloat16)).astype(jnp.float32).sum()), params
    )
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(gradients))


@every_kind
def test_it_drops_out_with_a_key_alone_and_keeps_the_mean(make_config, randomize, packed, kind):
    mixer = mixer_of(make_config(**KINDS[kind]))
    graphdef, params = randomize(functools.partial(module_of, mixer))
    draws = 200

    @jax.jit
    def run(keys):
        module = nnx.merge(graphdef, params)
        return module(states(), packed), jax.vmap(lambda k: module(states(), packed, k))(keys)

    whole, dropped = run(jax.random.split(jax.random.key(0), draws))
    if not hasattr(mixer, "attention_dropout"):
        np.testing.assert_allclose(dropped[0], whole, atol=1e-5)
        return
    assert np.abs(dropped[0] - whole).max() > 1e-2
    error = np.abs(dropped.mean(axis=0) - whole).max()
    assert error < 5 * float(dropped.std(axis=0).max()) / draws**0.5
    none = dataclasses.replace(mixer, attention_dropout=0.0)
    graphdef, _ = randomize(functools.partial(module_of, none))
    out = nnx.merge(graphdef, params)(states(), packed, jax.random.key(0))
    np.testing.assert_allclose(out, whole, atol=1e-5)


@pytest.fixture(scope="module")
def all_kinds(make_config):
    """An encoder with a layer of each kind, wide enough to be divided."""
    configs = [
        make_config(
            hidden_size=256, embedding_size=256, ffn_size=64, attention_dropout=0.0, **fields
        )
        for fields in KINDS.values()
    ]
    stages = tuple(StageConfig(1, config.encoder.stages[0].layer) for config in configs)
    return dataclasses.replace(configs[0].encoder, stages=stages)


@pytest.mark.slow
def test_on_eight_devices_they_are_what_they_are_on_one(all_kinds, randomize):
    """Rows, positions, parameters, heads divided: outputs and gradients of a layer of each kind."""
    graphdef, params = randomize(lambda rngs: Encoder(all_kinds, rngs), scale=0.05)
    ids = jnp.asarray([[1] * 5 + [2] * 3, [1] * 6 + [0] * 2] * 4)
    x, cotangent = (jax.random.normal(jax.random.key(i), (8, 8, 256)) for i in range(2))
    rules = (*sharding_rules(all_kinds), *sharding.RULES)

    def total(params, x):
        out = nnx.merge(graphdef, params)(x, ids)
        return jnp.sum(jnp.where((ids != 0)[..., None], out, 0) * cotangent), out

    def run(section, devices):
        mesh = sharding.make_mesh(section, jax.devices()[:devices])
        places = sharding.tree_shardings({"encoder": params}, mesh, rules)["encoder"]
        rows = sharding.batch_sharding(mesh)
        with jax.set_mesh(mesh):
            given = jax.device_put(params, places), jax.device_put(x, rows)
            step = jax.jit(jax.grad(total, has_aux=True), in_shardings=(places, rows))
            return places, jax.device_get(step(*given))

    _, (expected, wanted) = run(MeshSection(data=1), 1)
    places, (actual, out) = run(MeshSection(data=1, fsdp=2, tensor=2, sequence=2), 8)
    np.testing.assert_allclose(out, wanted, atol=1e-5 * np.abs(wanted).max())
    assert_agree(actual, expected)
    for stage in places["stages"].values():
        assert any("tensor" in leaf.spec for leaf in jax.tree.leaves(stage["mixer"]))


@every_kind
def test_it_is_exported_or_refused_in_a_sentence(make_config, tmp_path, kind):
    parts = networks.outline(make_config(generator={"kind": "uniform"}, **KINDS[kind]))
    network = parts["main"]
    mixer = network.layer.mixer
    if not mixer.inexpressible("huggingface", 32):
        assert network.family
        huggingface_config.check_expressible(network)
        return
    with pytest.raises(ConversionError, match="stablehlo") as error:
        huggingface_config.check_expressible(network)
    assert "\n" not in str(error.value)
    if mixer.inexpressible("tensorflow1", 32):
        with pytest.raises(ConversionError, match="stablehlo"):
            tensorflow1.write_checkpoint(tmp_path / "it", parts, step=0)


@every_kind
def test_weights_of_it_do_not_fit_into_another_mixer_unsaid(make_config, kind):
    """The config follows the weights; where it must not, the fields that differ are named."""
    config = make_config(**KINDS[kind])
    network = networks.outline(config)
    for other, fields in KINDS.items():
        start = make_config(layers=3, **fields)
        derived = matching.derive_fields(network, start)
        assert matching.replace(start, derived).encoder == config.encoder, other
        named = {path.partition(".")[2] for path in matching.differences(derived, start)}
        if other != kind:
            assert named & {"mixer", "mixer_fields", "kernel_size", "dilation"}, other


@every_kind
def test_a_run_that_insists_on_its_own_mixer_is_told_how_it_differs(make_config, kind):
    """`config.init_from` where the mixer was asked for by name, so that it does not follow."""
    source = sources.Source("run", networks.outline(make_config(**KINDS[kind])), step=1)
    for other, fields in KINDS.items():
        config = make_config(**fields)
        if config.encoder == make_config(**KINDS[kind]).encoder:
            sources.check_fits(source, config)
            continue
        with pytest.raises(ConversionError, match=r"holds a network with config\.model\.") as error:
            sources.check_fits(source, config)
        advice = str(error.value).partition("start it with ")[2]
        assert "\n" not in str(error.value)
        assert any(f"--config.model.{name}=" in advice for name in OWN), (other, advice)


@every_mixer
def test_fields_that_nobody_knows_are_refused(make_config, mixer):
    values = to_dict(make_config(mixer=mixer))
    values["model"]["mixer_fields"] = ["grain=1"]
    with pytest.raises(ConfigError, match="mixer_fields=grain=1 is no field of the mixer") as error:
        from_config_dict(values)
    assert "\n" not in str(error.value)
    del values["model"]["mixer_fields"]
    reads = mixer_of(make_config(mixer=mixer)).fields(32)
    if "heads" in reads and "head_ratio" not in reads:
        values["model"]["head_ratio"] = 4
        with pytest.raises(ConfigError, match="head_ratio=4 does nothing with"):
            from_config_dict(values)
