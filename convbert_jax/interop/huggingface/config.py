"""Conversion of network configs to and from `config.json` of ConvBert, Electra and Bert classes."""

from pathlib import Path
from typing import Any

from absl import logging

from convbert_jax.config import ConfigError, EmbeddingsConfig, EncoderConfig, from_config_dict
from convbert_jax.interop.claims import LARGEST, read_json, shown
from convbert_jax.interop.huggingface.finetuned_heads import USE, use_of
from convbert_jax.interop.networks import ConversionError, Network, describe_sizes
from convbert_jax.interop.tables import export_error
from convbert_jax.models.mixers.attention import Attention
from convbert_jax.models.mixers.mixed import Mixed

FILE = "config.json"
OURS = "convbert_jax"  # key in config.json that other software ignores
_USE = "use"  # key in OURS for Network.use
TUNED = {"sequence_head", "token_head", "span_head"}  # heads of fine-tuned models
_SEVERAL = "multi_label_classification"  # a problem_type without an equivalent task here
# Kind of task -> problem_type. Without it, pipelines apply a sigmoid to a regression output.
_PROBLEMS = {"classification": "single_label_classification", "regression": "regression"}
_MODEL_TYPES = {"convbert": "convbert", "conv_bert": "convbert", "electra": "electra"}
_MODEL_TYPES |= {"bert": "bert"}
_CLASS_NAMES = {"convbert": "ConvBert", "electra": "Electra", "bert": "Bert"}
# Head -> suffix of the class. A network without heads is the bare encoder; BERT with both heads of
# pre-training is BertForPreTraining.
CLASSES = {
    "mlm_head": "ForMaskedLM",
    "sequence_head": "ForSequenceClassification",
    "token_head": "ForTokenClassification",
    "span_head": "ForQuestionAnswering",
    "rtd_head": "ForPreTraining",
    "pair_head": "ForNextSentencePrediction",
}


def architecture(network: Network) -> str:
    """Returns the name of the transformers class that loads a network.

    ConvBertForPreTraining does not exist, so a ConvBERT discriminator is exported as the bare
    encoder, and its head as extra tensors that the class ignores. The same holds for the head for
    sentence pairs, which only BERT classes have.
    """
    name = _CLASS_NAMES[network.family]
    if network.family == "bert" and network.has("mlm_head") and network.has("pair_head"):
        return f"{name}ForPreTraining"
    for head, suffix in CLASSES.items():
        if network.has(head) and head not in unclassed_heads(network):
            return name + suffix
    return f"{name}Model"


def unclassed_heads(network: Network) -> tuple[str, ...]:
    """Returns the heads of a network that no class of its family has."""
    lacking = {"convbert": ("rtd_head", "pair_head"), "electra": ("pair_head",)}
    return tuple(head for head in lacking.get(network.family, ()) if network.has(head))


def check_expressible(network: Network) -> None:
    """Checks that a transformers class can compute a network.

    Raises:
      ConversionError: no class can; the message has the reason and a fix.
    """
    layer, family = network.layer, network.family
    why = export_error(layer.mixer, "huggingface", layer.hidden_size)
    if why or not family:
        raise ConversionError(
            why or "transformers has no class with this mixer. Export with --format=stablehlo."
        )
    if family == "convbert":
        return
    if layer.ffn_groups > 1:
        raise ConversionError(
            f"config.model.ffn_groups={layer.ffn_groups} without convolution is not supported by "
            "transformers. Train with 1 group, or export with --format=stablehlo.",
            field="config.model.ffn_groups",
            value=layer.ffn_groups,
        )
    if network.has("rtd_head") and family == "bert":
        raise ConversionError(
            "BERT classes have no head for replaced-token detection. Export as ELECTRA."
        )


def to_json(network: Network, *, pad_id: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of config.json.

    Args:
      pad_id: id of the padding token. Always written, because ConvBertConfig defaults to 1 and
        transformers does not train the embedding of the padding token.
      extra: JSON values stored under the key `convbert_jax`.
    """
    check_expressible(network)
    layer, embeddings, encoder = network.layer, network.embeddings, network.encoder
    mixer = layer.mixer
    content: dict[str, Any] = {
        "architectures": [architecture(network)],
        "model_type": network.family,
        "vocab_size": embeddings.vocab_size,
        "hidden_size": encoder.hidden_size,
        "num_hidden_layers": encoder.depth,
        "num_attention_heads": mixer.attention_heads * (2 if network.family == "convbert" else 1),
        "intermediate_size": layer.ffn_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": layer.dropout,
        "attention_probs_dropout_prob": mixer.attention_dropout,
        "max_position_embeddings": embeddings.positions,
        "type_vocab_size": embeddings.types,
        "initializer_range": layer.initializer_range,
        "layer_norm_eps": layer.layer_norm_epsilon,
        "pad_token_id": pad_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    if network.family != "bert":
        content["embedding_size"] = embeddings.size
    if network.family == "convbert":
        content |= {
            "head_ratio": 2,
            "conv_kernel_size": mixer.kernel_size,
            "num_groups": layer.ffn_groups,
        }
    if network.labels:
        content["id2label"] = {str(i): label for i, label in enumerate(network.labels)}
        content["label2id"] = {label: i for i, label in enumerate(network.labels)}
    kind = network.use.get("outputs.kind")
    if kind and network.has("sequence_head"):
        content["problem_type"] = _PROBLEMS.get(kind, kind)
    ours: dict[str, Any] = {"mask_convolution": not encoder.reads_padding}
    if network.use:
        ours[_USE] = dict(network.use)
    return content | {OURS: ours | extra}


def read(folder: Path) -> dict[str, Any]:
    """Reads config.json of a folder.

    Raises:
      ConversionError: the file is missing, damaged, or describes an unsupported model.
    """
    path = folder / FILE
    content = read_json(path)
    kind = content.get("model_type")
    if kind is None:
        content["model_type"] = kind = _guess_model_type(content, path)
    if not isinstance(kind, str) or kind not in _MODEL_TYPES:
        raise ConversionError(
            f"{path} has the unsupported model_type {shown(kind)}; expected a ConvBERT, ELECTRA or "
            "BERT model.",
            field="model_type",
            value=kind,
            path=path,
        )
    for field, wanted in (
        ("hidden_act", ("gelu", "gelu_python")),
        ("position_embedding_type", ("absolute", None)),
        ("is_decoder", (False,)),
        ("add_cross_attention", (False,)),
    ):
        if content.get(field, wanted[0]) not in wanted:
            raise ConversionError(
                f"{path} has {field}={shown(content[field])}, which is not supported; expected "
                f"{wanted[0]!r}.",
                field=field,
                value=content[field],
                path=path,
            )
    return content


def _guess_model_type(content: dict[str, Any], path: Path) -> str:
    """Derives the model type from the class name; folders from before 2020 have no model_type."""
    architectures = content.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    for family, start in _CLASS_NAMES.items():
        if name.startswith(start):
            logging.info("%s has no model_type; class %s implies %s.", path, shown(name), family)
            return family
    raise ConversionError(
        f'{path} has no model_type. Add "model_type": "bert", "electra" or "convbert", according '
        "to the weights.",
        field="model_type",
        path=path,
    )


def sizes(content: dict[str, Any]) -> tuple[str, EmbeddingsConfig, EncoderConfig]:
    """Returns (family, embeddings, encoder) of a config.json, with the defaults of transformers.

    Raises:
      ConversionError: a field without a default is missing, a value is out of range, or the hidden
        size is not divisible by the number of heads.
    """
    family = _MODEL_TYPES[content["model_type"]]

    def number(name, default=None):
        value = content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= LARGEST:
            raise ConversionError(
                f"config.json has {name}={shown(value)}, expected an integer from 1 to "
                f"{LARGEST:,}.",
                field=name,
                value=value,
            )
        return value

    def fraction(name, default):
        value = content.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConversionError(
                f"config.json has {name}={shown(value)}, expected a number of at least 0 and less "
                "than 1.",
                field=name,
                value=value,
            )
        return float(value)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    embedding_size = hidden if family == "bert" else number("embedding_size")
    attention_heads = heads
    if family == "convbert":  # the rounding of transformers
        attention_heads = max(1, heads // number("head_ratio", 2))
    parts = attention_heads * (2 if family == "convbert" else 1)
    if hidden % parts:
        raise ConversionError(
            f"config.json has hidden_size={hidden}, which is not divisible by {parts} heads.",
            field="hidden_size",
            value=hidden,
        )
    attention = {
        "attention_heads": attention_heads,
        "head_size": hidden // parts,
        "attention_dropout": fraction("attention_probs_dropout_prob", 0.1),
        "attention": "auto",
    }
    ours = content.get(OURS)
    mixer = Attention(**attention)
    if family == "convbert":
        mixer = Mixed(
            **attention,
            convolution_heads=attention_heads,
            kernel_size=number("conv_kernel_size", 9),
            convolution="auto",
            # Other software trains with convolutions that read padding.
            mask_convolution=bool(isinstance(ours, dict) and ours.get("mask_convolution")),
        )
    embeddings, encoder = describe_sizes(
        vocab_size=number("vocab_size"),
        embedding_size=embedding_size,
        positions=number("max_position_embeddings", 512),
        types=number("type_vocab_size", 2),
        depth=number("num_hidden_layers"),
        dropout=fraction("hidden_dropout_prob", 0.1),
        epsilon=fraction("layer_norm_eps", 1e-12),
        spread=fraction("initializer_range", 0.02),
        hidden_size=hidden,
        mixer=mixer,
        ffn_size=number("intermediate_size"),
        ffn_groups=number("num_groups", 1) if family == "convbert" else 1,
    )
    return family, embeddings, encoder


def read_use(content: dict[str, Any]) -> dict[str, Any]:
    """Returns `Network.use` of a config.json, with the kind of task from problem_type if missing.

    Raises:
      ConversionError: a field is unknown or has an invalid value.
    """
    ours = content.get(OURS)
    told = ours.get(_USE, {}) if isinstance(ours, dict) else {}
    if not isinstance(told, dict):
        raise ConversionError(
            f"config.json has {OURS}.{_USE}={shown(told)}, expected an object.",
            field=f"{OURS}.{_USE}",
            value=told,
        )
    sections: dict[str, dict[str, Any]] = {}
    for path, value in told.items():
        if path not in USE:
            raise ConversionError(
                f"config.json has the unknown field {shown(path)} in {OURS}.{_USE}; this version "
                f"supports {', '.join(USE)}.",
                field=path,
            )
        section, _, field = path.partition(".")
        sections.setdefault(section, {})[field] = value
    try:
        config = from_config_dict({"recipe": "finetune", **sections})
    except ConfigError as error:
        raise ConversionError(
            f"config.json, {OURS}.{_USE}: {error}", field=error.field, value=error.value
        ) from None
    use = {path: value for path, value in use_of(config).items() if path in told}
    problem = content.get("problem_type")
    if problem is not None and "outputs.kind" not in use:
        kinds = {theirs: ours for ours, theirs in _PROBLEMS.items()}
        if problem not in (*kinds, _SEVERAL):
            raise ConversionError(
                f"config.json has the unknown problem_type={shown(problem)}; choose one of "
                f"{', '.join(kinds)}.",
                field="problem_type",
                value=problem,
            )
        use["outputs.kind"] = kinds.get(problem, problem)
    return use
