"""README.md of an exported folder: sizes, usage and results of the parity check."""

from collections.abc import Sequence

from convbert_jax.interop.certificate import Certificate
from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.networks import Network

FILE = "README.md"


def write_card(
    network: Network, *, title: str, made_by: str, certificate: Certificate, notes: Sequence[str]
) -> str:
    """Returns the model card of a network as Markdown.

    Args:
      title: name of the run and role of the network.
      made_by: origin of the weights, one sentence.
      certificate: result of the parity check.
      notes: further paragraphs.
    """
    name = huggingface_config.architecture(network)
    layer, embeddings, encoder = network.layer, network.embeddings, network.encoder
    count = sum(array.size for array in network.parameters.values())
    parts = [
        f"---\nlibrary_name: transformers\ntags:\n- {network.family}\n---",
        f"# {title}",
        made_by,
        "\n".join(
            [
                "| | |",
                "|---|---|",
                f"| class | `{name}` |",
                f"| parameters | {count:,} |",
                f"| layers, hidden size, embedding size | {encoder.depth}, {encoder.hidden_size}, "
                f"{embeddings.size} |",
                f"| heads | {layer.mixer} |",
                f"| feed-forward | {layer.ffn_size}, {layer.ffn_groups} group(s) |",
                f"| vocabulary, longest input | {embeddings.vocab_size:,}, "
                f"{embeddings.positions} |",
            ]
        ),
        "```python\nfrom transformers import AutoTokenizer, "
        f"{_auto_class(name)}\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        f'model = {_auto_class(name)}.from_pretrained("FOLDER")\n```',
        *_say(network, name),
        *([certificate.padding] if certificate.padding else []),
        *notes,
        "## Parity\n\n" + "\n".join(f"- {line}" for line in certificate.lines()),
    ]
    return "\n\n".join(parts) + "\n"


def _auto_class(name: str) -> str:
    for suffix in huggingface_config.CLASSES.values():
        if name.endswith(suffix):
            return f"AutoModel{suffix}"
    return "AutoModel"


def _say(network: Network, name: str) -> list[str]:
    said = []
    if network.use.get("outputs.texts"):
        said.append(_reads(network))
    if name == "ConvBertModel" and network.has("rtd_head"):
        said.append(
            "The four `discriminator_predictions.*` tensors are the head for replaced-token "
            "detection. No ConvBERT class has this head, so transformers reports the tensors as "
            "UNEXPECTED and ignores them; convbert_jax loads them."
        )
    if "pair_head" in huggingface_config.unclassed_heads(network):
        said.append(
            "The four `pair_predictions.*` tensors are the head for sentence pairs. Only BERT "
            "classes have this head, so transformers reports the tensors as UNEXPECTED and "
            "ignores them; convbert_jax loads them."
        )
    if name == "BertForMaskedLM":
        said.append(
            "The model has no pooler: `AutoModel` initializes one and reports it as MISSING. Use "
            "`last_hidden_state`, or pass `add_pooling_layer=False` to `BertModel`."
        )
    if network.encoder.reads_padding:
        said.append(
            "As in the official code, the convolution reads padding: outputs depend slightly on "
            "the amount of padding."
        )
    return said


def _reads(network: Network) -> str:
    use = network.use
    columns, length = use.get("outputs.columns"), use.get("finetune.length")
    told = "two texts, `tokenizer(first, second)`" if use["outputs.texts"] == 2 else "one text"
    if columns:
        told += f", from {' and '.join(f'`{column}`' for column in columns)} of its training files"
    if length:
        told += f". Fine-tuning used at most {length} tokens, including special tokens"
    return f"The input is {told}."
