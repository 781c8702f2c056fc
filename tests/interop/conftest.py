"""Networks and runs with random weights, scaled so that any mistake changes the outputs."""

import contextlib
import dataclasses
import json
import pathlib
import re
import shutil
import signal

import jax
import numpy as np
import pytest

from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from convbert_jax.interop import networks, parity
from convbert_jax.training import checkpoints as checkpoints_lib
from convbert_jax.training import optimizer, train_step
from convbert_jax.workdir import Workdir

WORDS = "the a of river stone light under over small great house tree water fire sun moon star"
MODERN = dict(  # the block of ModernBERT, as fields of config.model
    mixer="attention", activation="geglu", norm="pre", biases=False, position_embedding="rotary",
    rotary_base=160_000.0, window=3, types=0, embedding_size=32, layer_norm_epsilon=1e-5,
)  # fmt: skip
SECONDS, MEGABYTES = 10, 1_000  # limits for reading a hostile file


def make_config(
    *,
    recipe="replaced_token",
    pairs="none",
    generator=None,
    tokenizer=None,
    outputs=None,
    finetune=None,
    pooling="mean",
    **model,
) -> Config:
    """Return a small config.

    Args:
      recipe: config.recipe.
      pairs: objective.sentence_pairs.
      pooling: objective.pooling.
      generator, tokenizer, outputs, finetune: fields of these sections.
      **model: fields of config.model.
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
    values["objective"]["pooling"] = pooling
    values["parallel"]["max_length"] = 16
    if values["model"]["mixer"] == "mixed" and not values["model"]["mask_convolution"]:
        values["data"]["layout"] = "electra"
    if pairs != "none":
        values["objective"]["sentence_pairs"], values["data"]["layout"] = pairs, "pairs"
    return from_config_dict(values)


def random_params(config: Config, seed: int = 0):
    """Draw independent parameters: mean 1 for scales and 0 for others, standard deviation 0.2."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return (center + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, networks.abstract_params(config))


def random_parts(seed=0, **fields) -> tuple[Config, dict[str, networks.Network]]:
    """Return a config and its networks with random weights."""
    config = make_config(**fields)
    return config, networks.split(config, random_params(config, seed))


def random_network(name="main", seed=0, **fields) -> networks.Network:
    """Return one network of a run with random weights."""
    return random_parts(seed, **fields)[1][name]


def with_head(network, head: str, labels: tuple[str, ...], seed=0) -> networks.Network:
    """Return the encoder of `network` with a different head."""
    rng = np.random.default_rng(seed)
    shapes = networks.shapes(network.embeddings, network.encoder, {head: len(labels)})
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
    """make_run(**fields of make_config) -> (folder, config) of a run with one checkpoint.

    Each call returns a new folder. `change` is applied to the parameters.
    """
    made = {}

    def make(step=3, change=None, **fields):
        folder, config = tmp_path_factory.mktemp("run") / "run", make_config(**fields)
        key = repr((step, config)) if change is None else None
        if key in made:
            return shutil.copytree(made[key], folder), config
        with Workdir(folder).open(config):
            words = [a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("r", "st", "nd")]
            texts = [" ".join(words[i::7]) for i in range(7)] + [WORDS]
            train_tokenizer(texts, config.tokenizer, folder / "data")
            transformation = optimizer.make_optimizer(config.optimizer, config.train.steps)
            params = random_params(config) if change is None else change(random_params(config))
            filled = train_step.create_state(
                jax.tree.map(jax.numpy.asarray, params), transformation
            )
            filled = dataclasses.replace(filled, step=jax.numpy.asarray(step, jax.numpy.int32))
            checkpoints = checkpoints_lib.Checkpoints(folder / "checkpoints", config.checkpoint)
            checkpoints.save(filled, {})
            checkpoints.close()
        if key:
            made[key] = shutil.copytree(folder, folder.parent / "kept")
        return folder, config

    return make


@pytest.fixture
def without_pytorch(monkeypatch):
    """Skip the comparison of exports with PyTorch's classes, which takes seconds."""
    monkeypatch.setattr(parity, "pytorch_is_there", lambda: False)


def assert_same(first: networks.Network, second: networks.Network) -> None:
    """Compare every parameter bit by bit."""
    assert first.parameters.keys() == second.parameters.keys()
    for path, array in first.parameters.items():
        np.testing.assert_array_equal(array, second.parameters[path], err_msg=path)


def write_entries(folder: pathlib.Path, entries) -> pathlib.Path:
    """Write vocab.txt and return its path."""
    (folder / "vocab.txt").write_text("".join(f"{e}\n" for e in entries), encoding="utf-8")
    return folder / "vocab.txt"


def edit_config(folder: pathlib.Path, **fields) -> None:
    """Change fields of config.json; "absent" removes a field."""
    file = folder / "config.json"
    content = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))


@contextlib.contextmanager
def limits():
    """Fail if reading takes too long or too much memory."""

    def stop(*_):
        raise TimeoutError(f"still reading after {SECONDS} seconds")

    with contextlib.suppress(OSError):  # elsewhere only a new peak is detected
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    assert _peak() - before < MEGABYTES


def _peak() -> float:
    """Return the peak memory of this process in megabytes, or 0 if unknown."""
    with contextlib.suppress(OSError):
        status = pathlib.Path("/proc/self/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
    return 0.0
