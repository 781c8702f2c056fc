"""Networks: single encoders with heads, the common form for reading, writing and comparing weights.

A pre-training model consists of one or two networks that may share parameters. `split` and `join`
convert between the parameters of a model and {"main": Network, "generator": Network}. "main" is
the discriminator, the masked language model or the fine-tuned model. `make_modules` and `forward`
build the Flax modules of a network.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config import (
    Config,
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    OutputsSection,
    StageConfig,
    UserError,
)
from convbert_jax.interop.blocks import unsupported_fields, without_place
from convbert_jax.interop.tables import MIXERS, READ_PADDING
from convbert_jax.models import build, heads
from convbert_jax.models.embeddings import Embeddings
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.layers import initializers
from convbert_jax.models.networks import MODELS
from convbert_jax.training.partitioning import flatten_params
from convbert_jax.training.train_step import fold_in_name


class ConversionError(UserError):
    """Weights that cannot be read, written, or loaded into a model."""


@dataclasses.dataclass(frozen=True)
class Network:
    """An encoder, its embeddings and its heads.

    Attributes:
      family: one of tables.FAMILIES, which determines foreign names and classes; "" if no other
        software has such layers.
      parameters: canonical path (see tables.py) -> float32 array. Possible heads are mlm_head,
        rtd_head, pair_head, sequence_head, token_head and span_head.
      labels: class names of a classifier, by index.
      use: config fields for inference with a fine-tuned model, as `{"outputs.texts": 2}`: the
        fields of `USE` that the source contains.
    """

    family: str
    embeddings: EmbeddingsConfig
    encoder: EncoderConfig
    parameters: Mapping[str, np.ndarray]
    labels: tuple[str, ...] = ()
    use: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def layer(self) -> LayerConfig:
        """The config shared by all layers, see `check_same_layers`."""
        return check_same_layers(self.encoder)

    @property
    def masked(self) -> bool:
        """Whether the network ignores padding although the PyTorch class of its family reads it."""
        return self.family in READ_PADDING and not self.encoder.reads_padding

    def with_masking(self, masked: bool) -> "Network":
        """Returns the same weights with convolutions that ignore padding (True) or read it."""
        encoder = self.encoder.with_mixers(mask_convolution=masked)
        return dataclasses.replace(self, encoder=encoder)

    def has(self, head: str) -> bool:
        return any(path.startswith(f"{head}/") for path in self.parameters)


@dataclasses.dataclass(frozen=True)
class Report:
    """Parameter paths that `join` loaded, initialized or ignored.

    Attributes:
      loaded: parameters of the model that came from the source.
      initialized: parameters of the model that the source lacks, initialized as in a new run.
      ignored: parameters of the source that the model lacks.
    """

    loaded: tuple[str, ...]
    initialized: tuple[str, ...]
    ignored: tuple[str, ...]

    def lines(self) -> list[str]:
        """Returns the report as lines for the log, with all initialized and ignored paths."""
        lines = [f"Loaded {len(self.loaded)} parameters."]
        for title, names in (("Initialized", self.initialized), ("Ignored", self.ignored)):
            if names:
                lines.append(f"{title} {len(names)}: {', '.join(names)}.")
        return lines


def check_same_layers(encoder: EncoderConfig) -> LayerConfig:
    """Returns the config shared by all layers, which other software requires.

    Windows, rotary bases and the missing norm of the first layer are left out.

    Raises:
      ConversionError: the layers differ in anything else.
    """
    layer = without_place(encoder.stages[0].layer)
    if any(without_place(other) != layer for other in encoder.layers):
        raise ConversionError(
            "The layers of this encoder differ, which neither transformers nor the official "
            "TensorFlow code supports. Export it with --format=stablehlo."
        )
    return layer


def check_block(network: Network, families: Sequence[str], software: str) -> None:
    """Checks that a network belongs to one of the families that a software supports.

    Args:
      software: its name, for the error message.

    Raises:
      ConversionError: it does not; the message names a field of the block.
    """
    if network.family in families:
        return
    of_mixer, _ = MIXERS[type(network.layer.mixer)]
    found = [
        unsupported_fields(family, network.encoder, network.embeddings)
        for family in of_mixer
        if family in families
    ]
    field, (value, wanted) = next(iter(min(found, key=len).items()))
    raise ConversionError(
        f"config.model.{field}={value} is not supported by {software} in this model; expected "
        f"{wanted}. Export with --format=stablehlo.",
        field=f"config.model.{field}",
        value=value,
    )


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
    """Builds the configs of a foreign network; all other fields get their defaults.

    Args:
      epsilon: epsilon of the layer norms.
      spread: standard deviation of the initializers.
      layer: fields of LayerConfig.
    """
    ours = Config()
    shared = {"layer_norm_epsilon": epsilon, "dropout": dropout}
    first = ours.encoder.stages[0].layer
    made = dataclasses.replace(first, **layer, **shared, initializer_range=spread)
    encoder = dataclasses.replace(
        ours.encoder,
        embedding_size=embedding_size,
        hidden_size=layer["hidden_size"],
        stages=(StageConfig(depth, (made,)),),
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
    """Returns network -> {part of the network: path of that part in the model's parameters}.

    Raises:
      ConversionError: the model generates text.
    """
    if config.spec.generates:
        raise ConversionError(
            f"Models of config.recipe='{config.recipe}' generate text; they can be exported only "
            "with --format=huggingface, as language models with the layers of LFM2. Use "
            "--mode=predict or convbert_jax.load.",
            field="config.recipe",
            value=config.recipe,
        )
    return MODELS[config.recipe].parts(config)


OWN = "own_embeddings"  # the main network adds these to the embeddings of the generator


def is_disentangled(config: Config) -> bool:
    """Returns whether the embeddings of the main network are a sum, see `split`."""
    return "generator" not in config.spec.unread and config.generator.disentangle_embeddings


def split(config: Config, params, fold=np.add) -> dict[str, Network]:
    """Splits the parameters of a model into networks; both contain the shared parameters.

    Outputs of a fine-tuned regression are scaled to the unit of the labels. The official code's
    head on [CLS], one dense layer, is converted to the two layers of Hugging Face's head.

    Args:
      fold: (shared, own) -> embeddings of the main network if they are disentangled
        (`config.generator.disentangle_embeddings`). The default, a sum, is right for parameters.
    """
    flat = {path: np.asarray(leaf) for path, leaf in flatten_params(params).items()}
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
        if config.spec.data == "task":
            tree = in_label_units(tree, config.outputs)
            tree = as_sequence_head(tree)
            labels, use = config.outputs.labels, use_of(config)
        result[name] = Network(
            _family(places(config)["main"], encoder, embeddings),
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
    """Loads networks into the parameters of a model; the inverse of `split`.

    Args:
      start: values of the parameters that no network has; None initializes them as a new run of
        `config` does.

    Returns:
      parameters, a nested dict of numpy arrays, and a report.

    Raises:
      ConversionError: a parameter has another shape, or tied parameters differ.
    """
    found: dict[str, tuple[str, np.ndarray]] = {}
    ignored = []
    abstract = abstract_params(config)
    wanted = flatten_params(abstract)
    sources = places(config)
    for name, network in networks.items():
        roots = sources.get(name, {})
        if name == "main" and is_disentangled(config) and "generator" in networks:
            roots = {**roots, "embeddings": OWN}
            network = _less_shared(network, networks["generator"])
        encoder = network.encoder
        if name in sources and _sizes(config, name)[1].depth == encoder.depth:
            encoder = _sizes(config, name)[1]  # the run may group the same layers into other stages
        for path, array in stack(network.parameters, encoder).items():
            part, _, rest = path.partition("/")
            ours = f"{roots.get(part)}/{rest}"
            if ours not in wanted:
                ignored.append(f"{name}:{path}")
            elif array.shape != wanted[ours].shape:
                raise ConversionError(
                    f"Parameter {ours} has shape {array.shape} in the source but "
                    f"{wanted[ours].shape} in this run. Set config.model and config.generator to "
                    "the sizes of the source.",
                    field=ours,
                )
            elif ours in found and not np.array_equal(found[ours][1], array):
                raise ConversionError(
                    f"Parameter {ours} is tied in this run but has two values in the source. Set "
                    "--config.generator.tie_embeddings=false and --config.generator.kind=separate.",
                    field=ours,
                )
            else:
                found[ours] = (name, array)
    paths = list(wanted)
    if start is None and any(path not in found for path in paths):
        start = initial_params(config)
    rest = flatten_params(start) if start else {}
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
    """Subtracts the embeddings of the generator from `main` (disentangled sharing)."""
    shared = generator.parameters
    own = {
        path: leaf - shared[path] if path in shared and shared[path].shape == leaf.shape else leaf
        for path, leaf in main.parameters.items()
        if path.startswith("embeddings/")
    }
    return dataclasses.replace(main, parameters={**main.parameters, **own})


def unstack(tree: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Splits stacked stages into layers: `encoder/stages/0/mixer/...` -> `layers/3/mixer/...`."""
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
    """Stacks layers into stages; the inverse of `unstack`.

    Omits a parameter if any layer of the stage lacks it.
    """
    tree = {
        f"encoder/{path}" if path.startswith(("embeddings_project/", "norm/")) else path: leaf
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
    """Initializes the parameters of a new run of `config`, on the host."""
    _, init = build(MODELS[config.recipe], config)
    key = fold_in_name(jax.random.key(config.seed), "init")
    return jax.device_get(jax.jit(init)(key))


def outline(config: Config) -> dict[str, Network]:
    """Returns the networks of a run without parameters."""
    return {
        name: Network(_family(places(config)["main"], encoder, embeddings), embeddings, encoder, {})
        for name in places(config)
        for embeddings, encoder in (_sizes(config, name),)
    }


@functools.lru_cache(maxsize=8)  # tracing a model is slow
def abstract_params(config: Config):
    """Returns the shapes of the parameters of a run as a nested dict."""
    _, init = build(MODELS[config.recipe], config)
    return jax.eval_shape(init, jax.random.key(0))


def to_tree(flat: Mapping[str, np.ndarray]) -> dict:
    """Converts a dict of arrays by path to a nested dict."""
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


def _family(main: Collection[str], encoder: EncoderConfig, embeddings: EmbeddingsConfig) -> str:
    """Returns the family whose names and classes fit an encoder; "" if none does.

    Args:
      main: parts of the main network.
    """
    layer = without_place(encoder.stages[0].layer)
    families, _ = MIXERS.get(type(layer.mixer), ((), {}))
    if any(without_place(other) != layer for other in encoder.layers):
        return ""
    for family in families:
        if family == "bert" and "mlm_head" not in main:
            continue
        if not unsupported_fields(family, encoder, embeddings):
            return family
    return ""


# Config fields for inference that are exported with a fine-tuned model, in addition to its labels.
USE = (
    *("outputs.task", "outputs.kind", "outputs.texts", "outputs.columns"),
    *("finetune.length", "finetune.query_length", "finetune.stride", "finetune.answer_length"),
)


def use_of(config: Config) -> dict[str, Any]:
    """Returns field -> value for the fields of USE."""
    parts = ((path, *path.split(".")) for path in USE)
    return {path: getattr(getattr(config, section), field) for path, section, field in parts}


def in_label_units(
    parameters: Mapping[str, np.ndarray], outputs: OutputsSection
) -> dict[str, np.ndarray]:
    """Multiplies the last layer of a regression by `outputs.scale`, which is not exported."""
    name = f"{outputs.head}_head/output/"
    return {
        path: leaf * np.float32(outputs.scale) if path.startswith(name) else leaf
        for path, leaf in parameters.items()
    }


def as_sequence_head(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rewrites a single dense layer on [CLS] as the equivalent dense, GELU, dense.

    The inner layer computes every output and its negative; the outer layer subtracts the two:
    GELU(z) - GELU(-z) = z Phi(z) + z Phi(-z) = z, up to float32 rounding.

    Other heads are unchanged, and so are those whose number of outputs exceeds half of the hidden
    size.
    """
    kernel = parameters.get("first_token_head/output/kernel")
    if kernel is None or 2 * kernel.shape[1] > kernel.shape[0]:
        return dict(parameters)
    bias = parameters["first_token_head/output/bias"]
    hidden, count = kernel.shape
    inner, inner_bias = np.zeros((hidden, hidden), np.float32), np.zeros(hidden, np.float32)
    outer = np.zeros((hidden, count), np.float32)
    for sign, place in ((1, slice(0, count)), (-1, slice(count, 2 * count))):
        inner[:, place], inner_bias[place] = sign * kernel, sign * bias
        outer[place] = sign * np.eye(count)
    rest = {
        path: leaf for path, leaf in parameters.items() if not path.startswith("first_token_head/")
    }
    return rest | {
        "sequence_head/dense/kernel": inner,
        "sequence_head/dense/bias": inner_bias,
        "sequence_head/output/kernel": outer,
        "sequence_head/output/bias": np.zeros(count, np.float32),
    }


HEADS = {
    "mlm_head": heads.MaskedLanguageHead,
    "rtd_head": heads.DiscriminatorHead,
    "pair_head": heads.PairHead,
    "sequence_head": heads.SequenceHead,
    "token_head": heads.TokenHead,
    "span_head": heads.TokenHead,
}


def shapes(
    embeddings: EmbeddingsConfig, encoder: EncoderConfig, outputs: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every parameter of a network by canonical path.

    Args:
      outputs: head -> number of logits.
    """
    parts = make_modules(embeddings, encoder, outputs)
    flat = flatten_params(nnx.to_pure_dict(nnx.state(parts, nnx.Param)))
    # Broadcasting a scalar avoids allocating arrays whose shape alone is needed.
    counted = unstack({path: np.broadcast_to(0.0, leaf.shape) for path, leaf in flat.items()})
    return {path: leaf.shape for path, leaf in counted.items()}


def forward(network: Network):
    """Returns a jitted float32 forward pass of a network, without dropout.

    The function maps (tokens, segment_ids, type_ids), each [B, L], to a dict of "hidden" [B, L, C]
    and the logits of each head.
    """
    outputs = {head: _outputs(network, head) for head in HEADS if network.has(head)}
    graphdef = nnx.graphdef(make_modules(network.embeddings, network.encoder, outputs))
    params = jax.tree.map(jnp.asarray, to_tree(stack(network.parameters, network.encoder)))

    @jax.jit
    def run(params, tokens, segment_ids, type_ids):
        parts = nnx.merge(graphdef, params)
        x = parts["embeddings"](tokens, segment_ids, type_ids)
        hidden = parts["encoder"](x, segment_ids)
        results = {"hidden": hidden}
        for head in outputs:
            table = (parts["embeddings"],) if head == "mlm_head" else ()
            results[head] = parts[head](hidden, *table)
        return results

    return functools.partial(run, params)


def make_modules(
    embeddings: EmbeddingsConfig, encoder: EncoderConfig, outputs: Mapping[str, int]
) -> nnx.Dict:
    """Builds the modules of a network with abstract parameters (shapes and dtypes only)."""
    return _make_modules(embeddings, encoder, tuple(outputs.items()))


@functools.lru_cache(maxsize=8)
def _make_modules(embeddings, encoder, outputs) -> nnx.Dict:
    def make():
        starts, rngs = initializers("release", 0.02), nnx.Rngs(0)
        parts = {
            "embeddings": Embeddings(embeddings, starts.dense, rngs),
            "encoder": Encoder(encoder, rngs),
        }
        for head, count in outputs:
            own = {"mlm_head": (embeddings,), "rtd_head": (), "pair_head": ()}
            sizes = own.get(head, (count,))
            parts[head] = HEADS[head](encoder.hidden_size, *sizes, starts, rngs)
        return nnx.Dict(parts)

    return nnx.eval_shape(make)


def _outputs(network: Network, head: str) -> int:
    last = "output_bias" if head == "mlm_head" else "output/bias"
    return network.parameters[f"{head}/{last}"].shape[0]
