"""One encoder with its heads, by itself: the form in which weights are read, written and compared.

A pre-training model is one or two of them around shared parts: `split` and `join` go between its
parameters and a mapping {"main": Network, "generator": Network}. "main" is the encoder that is
kept, the discriminator or the masked language model.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from convbert_jax.config import (
    Config,
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    UserError,
    mixers,
)
from convbert_jax.interop.huggingface import finetuned_heads
from convbert_jax.interop.tables import READ_PADDING
from convbert_jax.models import pretraining, sequences
from convbert_jax.models.build import build
from convbert_jax.models.finetuned import FinetunedModel
from convbert_jax.training.state import flatten, fold_in_name

MODELS = {**pretraining.MODELS, **sequences.MODELS, "finetune": FinetunedModel}  # by config.recipe


class ConversionError(UserError):
    """Weights that cannot be read, written, or put into this model."""


@dataclasses.dataclass(frozen=True)
class Network:
    """An encoder, its embeddings and its heads.

    Attributes:
      family: of tables.FAMILIES: whose names and classes it goes by; "" if nobody else's.
      parameters: canonical path (see tables.py) -> float32 array. Heads are there if the network
        has them: mlm_head, rtd_head, pair_head, sequence_head, token_head, span_head.
      labels: names of a classifier's classes, by index.
      use: fields of a config that a fine-tuned model is used with, as `{"outputs.texts": 2}`; those
        of `finetuned_heads.USE` that its source tells.
    """

    family: str
    embeddings: EmbeddingsConfig
    encoder: EncoderConfig
    parameters: Mapping[str, np.ndarray]
    labels: tuple[str, ...] = ()
    use: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer(self) -> LayerConfig:
        """The layer that all stages repeat.

        Raises:
          ConversionError: they differ.
        """
        return check_same_layers(self.encoder)

    @property
    def masked(self) -> bool:
        """Whether it does not read padding, where the classes of its family do."""
        return self.family in READ_PADDING and not self.encoder.reads_padding

    def with_masking(self, masked: bool) -> "Network":
        """The same weights with convolutions that ignore padding, or read it."""
        stages = tuple(
            dataclasses.replace(
                stage,
                layer=dataclasses.replace(
                    stage.layer, mixer=mixers.change(stage.layer.mixer, mask_convolution=masked)
                ),
            )
            for stage in self.encoder.stages
        )
        return dataclasses.replace(self, encoder=dataclasses.replace(self.encoder, stages=stages))

    def has(self, head: str) -> bool:
        return any(path.startswith(f"{head}/") for path in self.parameters)


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of every parameter; paths are those of the model that was filled."""

    loaded: tuple[str, ...]
    initialized: tuple[str, ...]  # not in the source; as a new run starts them
    ignored: tuple[str, ...]  # in the source, without a place in the model

    def lines(self) -> list[str]:
        """For a person; nothing is left out, parameters of one module share a line."""
        lines = [f"Loaded {len(self.loaded)} parameters."]
        for title, names in (("Initialized", self.initialized), ("Ignored", self.ignored)):
            if names:
                lines.append(f"{title} {len(names)}: {', '.join(names)}.")
        return lines


def check_same_layers(encoder: EncoderConfig) -> LayerConfig:
    """The layer of an encoder all of whose layers are the same, as other software has them.

    Raises:
      ConversionError: they differ.
    """
    layer = encoder.stages[0].layer
    if any(stage.layer != layer for stage in encoder.stages):
        raise ConversionError(
            "the layers of this encoder differ, which neither Hugging Face's classes nor the "
            "official code can express; export it with --format=stablehlo."
        )
    return layer


def describe_sizes(
    *,
    vocab_size: int,
    embedding_size: int,
    positions: int,
    types: int,
    depth: int,
    dropout: float,
    epsilon: float,
    spread: float,
    **layer: Any,
) -> tuple[EmbeddingsConfig, EncoderConfig]:
    """The configs of a network that was not made here; what a source cannot say is our default.

    Args:
      epsilon: of the layer norms.
      spread: standard deviation of the initializers.
      layer: fields of LayerConfig.
    """
    ours = Config()
    shared = {"layer_norm_epsilon": epsilon, "dropout": dropout}
    first = ours.encoder.stages[0].layer
    stage = dataclasses.replace(
        ours.encoder.stages[0],
        depth=depth,
        layer=dataclasses.replace(first, **layer, **shared, initializer_range=spread),
    )
    encoder = dataclasses.replace(
        ours.encoder,
        embedding_size=embedding_size,
        hidden_size=layer["hidden_size"],
        stages=(stage,),
        initializer_range=spread,
    )
    embeddings = dataclasses.replace(
        ours.embeddings,
        vocab_size=vocab_size,
        size=embedding_size,
        positions=positions,
        types=types,
        **shared,
    )
    return embeddings, encoder


def places(config: Config) -> dict[str, dict[str, str]]:
    """Network -> {part of it: root of that part in the model's parameters}.

    Raises:
      ConversionError: the model writes text, which none of the other formats holds.
    """
    if config.writes_text:
        raise ConversionError(
            f"a model of config.recipe='{config.recipe}' writes text; no class of Hugging Face's "
            "library and no TensorFlow 1 checkpoint holds its parameters, so it is used by "
            "--mode=predict and convbert_jax.load.",
            field="config.recipe",
            value=config.recipe,
        )
    if config.recipe == "masked_lm":
        parts = {"embeddings": "embeddings", "encoder": "encoder", "mlm_head": "head"}
        pairs = config.objective.sentence_pairs != "none"
        return {"main": parts | ({"pair_head": "pair_head"} if pairs else {})}
    if config.recipe == "finetune":
        head = finetuned_heads.NAMES.get(config.outputs.head, config.outputs.head)
        return {"main": {"embeddings": "embeddings", "encoder": "encoder", head: "head"}}
    main = {
        "embeddings": "embeddings",
        "encoder": "discriminator",
        "rtd_head": "discriminator_head",
    }
    if config.generator.kind == "uniform":
        return {"main": main}
    generator = {
        "embeddings": "embeddings",
        "encoder": "generator",
        "mlm_head": "generator_head",
    }
    if config.generator.kind == "shared":
        generator["encoder"] = "discriminator"
    elif not config.generator.tie_embeddings:
        generator["embeddings"] = "generator_embeddings"
    return {"main": main, "generator": generator}


OWN = "own_embeddings"  # what the main network adds to the embeddings of the generator


def is_disentangled(config: Config) -> bool:
    """Whether the embeddings of the main network are a sum, see `split`."""
    return config.recipe == "replaced_token" and config.generator.disentangle_embeddings


def split(config: Config, params, fold=np.add) -> dict[str, Network]:
    """The networks of a model with all their parameters; shared ones are in both.

    Args:
      fold: (shared, own) -> one array of the main network's embeddings, where it adds its own to
        those of the generator (`config.generator.disentangle_embeddings`); a sum for parameters.

    Outputs of a fine-tuned model are in the labels' unit, and the release's head on [CLS] comes as
    the two layers of Hugging Face's.
    """
    flat = {path: np.asarray(leaf) for path, leaf in flatten(params).items()}
    result = {}
    for name, parts in places(config).items():
        embeddings, encoder = _sizes(config, name)
        labels, use = (), {}
        tree = {
            f"{part}/{path.removeprefix(root + '/')}": leaf
            for part, root in parts.items()
            for path, leaf in flat.items()
            if path.startswith(root + "/")
        }
        if name == "main" and is_disentangled(config):
            for path in [path for path in tree if path.startswith("embeddings/")]:
                tree[path] = fold(tree[path], flat[f"{OWN}/{path.removeprefix('embeddings/')}"])
        if config.recipe == "finetune":
            tree = finetuned_heads.in_label_units(tree, config.outputs)
            tree = finetuned_heads.as_sequence_head(tree)
            labels, use = config.outputs.labels, finetuned_heads.use_of(config)
        result[name] = Network(
            _family(config.recipe, encoder, embeddings),
            embeddings,
            encoder,
            unstack(tree),
            labels,
            use,
        )
    return result


def join(
    config: Config, networks: Mapping[str, Network], start: dict | None = None
) -> tuple[dict, Report]:
    """Puts networks into the parameters of a model.

    Args:
      start: parameters that keep what no network has; None: those of a new run of `config`.

    Returns:
      parameters, a nested dict of numpy arrays, and what came from where.

    Raises:
      ConversionError: a parameter has another shape, or tied parameters differ.
    """
    found: dict[str, tuple[str, np.ndarray]] = {}
    ignored = []
    abstract = abstract_params(config)
    wanted = flatten(abstract)
    sources = places(config)
    for name, network in networks.items():
        roots = sources.get(name, {})
        if name == "main" and is_disentangled(config) and "generator" in networks:
            roots = {**roots, "embeddings": OWN}
            network = _less_shared(network, networks["generator"])
        encoder = network.encoder
        if name in sources and _sizes(config, name)[1].depth == encoder.depth:
            encoder = _sizes(config, name)[1]  # the same layers may be cut into other stages
        for path, array in stack(network.parameters, encoder).items():
            part, _, rest = path.partition("/")
            ours = f"{roots.get(part)}/{rest}"
            if ours not in wanted:
                ignored.append(f"{name}:{path}")
            elif array.shape != wanted[ours].shape:
                raise ConversionError(
                    f"parameter {ours} has shape {array.shape} in the source and "
                    f"{wanted[ours].shape} in this run; set config.model and config.generator to "
                    "the sizes of the source.",
                    field=ours,
                )
            elif ours in found and not np.array_equal(found[ours][1], array):
                raise ConversionError(
                    f"parameter {ours} is tied in this run, but the source has two of them; set "
                    "--config.generator.tie_embeddings=false and --config.generator.kind=separate.",
                    field=ours,
                )
            else:
                found[ours] = (name, array)
    paths = list(wanted)
    if start is None and any(path not in found for path in paths):
        start = initial_params(config)
    rest = flatten(start) if start else {}
    filled = [
        found[path][1].astype(np.float32) if path in found else np.asarray(rest[path])
        for path in paths
    ]
    report = Report(
        loaded=tuple(path for path in paths if path in found),
        initialized=tuple(path for path in paths if path not in found),
        ignored=tuple(ignored),
    )
    return jax.tree.unflatten(jax.tree.structure(abstract), filled), report


def _less_shared(main: Network, generator: Network) -> Network:
    """`main` with what its embeddings add to those of the generator in their place."""
    shared = generator.parameters
    own = {
        path: leaf - shared[path] if path in shared and shared[path].shape == leaf.shape else leaf
        for path, leaf in main.parameters.items()
        if path.startswith("embeddings/")
    }
    return dataclasses.replace(main, parameters={**main.parameters, **own})


def unstack(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Paths of one network, `encoder/stages/0/mixer/...` -> `layers/3/mixer/...`."""
    flat, first = {}, {}
    depths = {
        path.split("/")[2]: len(leaf)
        for path, leaf in tree.items()
        if path.startswith("encoder/stages/")
    }
    for stage in sorted(depths, key=int):
        first[stage] = sum(depths[before] for before in depths if int(before) < int(stage))
    for path, leaf in tree.items():
        if not path.startswith("encoder/stages/"):
            flat[path.removeprefix("encoder/")] = leaf
            continue
        _, _, stage, inner = path.split("/", 3)
        for index, layer in enumerate(leaf):
            flat[f"layers/{first[stage] + index}/{inner}"] = layer
    return flat


def stack(flat: Mapping[str, np.ndarray], encoder: EncoderConfig) -> dict[str, np.ndarray]:
    """The way back; a parameter that some layer of its stage lacks is left out."""
    tree = {
        f"encoder/{path}" if path.startswith("embeddings_project/") else path: leaf
        for path, leaf in flat.items()
        if not path.startswith("layers/")
    }
    inner = sorted({path.split("/", 2)[2] for path in flat if path.startswith("layers/")})
    first = 0
    for number, stage in enumerate(encoder.stages):
        for name in inner:
            layers = [flat.get(f"layers/{first + i}/{name}") for i in range(stage.depth)]
            if all(layer is not None for layer in layers):
                tree[f"encoder/stages/{number}/{name}"] = np.stack(layers)
        first += stage.depth
    return tree


def initial_params(config: Config):
    """Parameters as a new run of `config` starts them, on the host."""
    _, init = build(MODELS[config.recipe], config)
    key = fold_in_name(jax.random.key(config.seed), "init")
    return jax.device_get(jax.jit(init)(key))


def outline(config: Config) -> dict[str, Network]:
    """The networks of a run without their parameters."""
    return {
        name: Network(_family(config.recipe, encoder, embeddings), embeddings, encoder, {})
        for name in places(config)
        for embeddings, encoder in (_sizes(config, name),)
    }


@functools.lru_cache(maxsize=8)  # tracing a model takes a second
def abstract_params(config: Config):
    """Shapes of the parameters of a run, as a nested dict."""
    _, init = build(MODELS[config.recipe], config)
    return jax.eval_shape(init, jax.random.key(0))


def to_tree(flat: Mapping[str, np.ndarray]) -> dict:
    """Arrays by path as a nested dict."""
    tree: dict = {}
    for path, leaf in flat.items():
        *folders, last = path.split("/")
        functools.reduce(lambda inner, key: inner.setdefault(key, {}), folders, tree)[last] = leaf
    return tree


def _sizes(config: Config, name: str) -> tuple[EmbeddingsConfig, EncoderConfig]:
    if name == "main" or config.generator.kind == "shared":
        return config.embeddings, config.encoder
    tied = config.generator.tie_embeddings
    embeddings = config.embeddings if tied else config.generator_embeddings
    return embeddings, config.generator_encoder


def _family(recipe: str, encoder: EncoderConfig, embeddings: EmbeddingsConfig) -> str:
    """Whose names and classes an encoder goes by, "" if nobody has layers like these."""
    layer = encoder.stages[0].layer
    families = layer.mixer.FAMILIES
    if not families or any(stage.layer != layer for stage in encoder.stages):
        return ""
    equal = embeddings.size == encoder.hidden_size
    bert = "bert" in families and recipe == "masked_lm" and equal
    return "bert" if bert else families[0]
