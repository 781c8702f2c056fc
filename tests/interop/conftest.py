"""Networks and runs with random weights, large enough that a mistake anywhere shows."""

import dataclasses

import jax
import numpy as np
import pytest

from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from convbert_jax.interop import modules, networks
from convbert_jax.training import optimizer, state
from convbert_jax.training.checkpoints import saving as checkpoint
from convbert_jax.workdir import Workdir

WORDS = "the a of river stone light under over small great house tree water fire sun moon star"


def make_config(
    *,
    recipe="replaced_token",
    pairs="none",
    generator=None,
    tokenizer=None,
    outputs=None,
    finetune=None,
    **model,
) -> Config:
    """A small config; `pairs` is objective.sentence_pairs, the others but `recipe` and `model` are
    fields of their sections.
    """
    small = dict(layers=2, hidden_size=32, embedding_size=16, heads=4, ffn_size=64, positions=24)
    values = to_dict(Config(recipe=recipe))
    values["model"] |= small | model
    values["model"]["stages"] = [dataclasses.asdict(stage) for stage in model.get("stages", ())]
    values["generator"] |= {"size": 0.5} | (generator or {})
    values["tokenizer"] |= {"vocab_size": 60} | (tokenizer or {})
    values["data"] |= {"length": 16}
    values["outputs"] |= outputs or {}
    values["finetune"] |= finetune or {}
    if values["model"]["mixer"] == "mixed" and not values["model"]["mask_convolution"]:
        values["data"]["layout"] = "electra"
    if pairs != "none":
        values["objective"]["sentence_pairs"], values["data"]["layout"] = pairs, "pairs"
    return from_config_dict(values)


def random_params(config: Config, seed: int = 0):
    """Parameters drawn independently, scales around 1."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return (center + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, networks.abstract_params(config))


def random_network(name="main", seed=0, **fields) -> networks.Network:
    """One network of a run with random weights."""
    config = make_config(**fields)
    return networks.split(config, random_params(config, seed))[name]


def with_head(network, head: str, labels: tuple[str, ...], seed=0) -> networks.Network:
    """The encoder of `network` with another head."""
    rng = np.random.default_rng(seed)
    shapes = modules.shapes(network.embeddings, network.encoder, {head: len(labels)})
    parameters = {
        path: network.parameters[path]
        if path in network.parameters
        else (0.2 * rng.standard_normal(shape)).astype(np.float32)
        for path, shape in shapes.items()
    }
    kept = labels if head in ("sequence_head", "token_head") else ()
    return dataclasses.replace(network, parameters=parameters, labels=kept)


@pytest.fixture(scope="session")
def make_run(tmp_path_factory):
    """make_run(**fields of make_config) -> (folder, config) of a run with one checkpoint; `change`
    is done to its parameters.
    """

    def make(step=3, change=lambda params: params, **fields):
        folder = tmp_path_factory.mktemp("run") / "run"
        config = make_config(**fields)
        with Workdir(folder).open(config):
            words = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("r", "st", "nd")]
            texts = [" ".join(words[i::7]) for i in range(7)] + [WORDS]
            train_tokenizer(texts, config.tokenizer, folder / "data")
            transformation = optimizer.make_optimizer(config.optimizer, config.train.steps)
            params = jax.tree.map(jax.numpy.asarray, change(random_params(config)))
            filled = state.create(params, transformation)
            filled = dataclasses.replace(filled, step=jax.numpy.asarray(step, jax.numpy.int32))
            checkpoints = checkpoint.Checkpoints(folder / "checkpoints", config.checkpoint)
            checkpoints.save(filled, {})
            checkpoints.close()
        return folder, config

    return make


def assert_same(first: networks.Network, second: networks.Network) -> None:
    """Every parameter equal to the bit."""
    assert first.parameters.keys() == second.parameters.keys()
    for path, array in first.parameters.items():
        np.testing.assert_array_equal(array, second.parameters[path], err_msg=path)
