"""Parity check of exported weights: the same inputs through two implementations.

The reader of this package must return every array bit for bit. If PyTorch is installed, outputs of
the PyTorch class are also compared with outputs of this package, in float32 on the CPU.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax.config.network import LanguageModelConfig
from convbert_jax.interop import huggingface
from convbert_jax.interop.networks import ConversionError, Network, forward
from convbert_jax.interop.sentence_transformers import VectorConfig
from convbert_jax.interop.tables import READ_PADDING
from convbert_jax.models.networks import LanguageModel

LIMIT = 1e-4  # largest absolute difference in float32; the larger of LIMIT and
_SHARE = 1e-5  # this fraction of the largest output applies
_ROWS, _LENGTH, _SEED = 4, 128, 0
_BATCH = 50  # rows whose labels are compared
_REMEDY = (
    f"Load the folder with trust_remote_code=True, which uses the class in {huggingface.MASKED}.py "
    "and ignores padding; otherwise run one text at a time, or batches of equal length."
)


class ParityError(ConversionError):
    """Two implementations of the same weights disagree."""


@dataclasses.dataclass(frozen=True)
class ParityReport:
    """Result of a parity check: the largest absolute difference of each output.

    Attributes:
      network: "main" or "generator".
      against: class and versions of the other implementation; "" if outputs were not compared.
      differences: output -> largest difference on full rows, and "OUTPUT, padded" -> on padded
        rows, for a masked ConvBERT from the class in its folder.
      parameters: number of arrays that were read back bit for bit.
      padding: effect of padded batches in the other class, see `describe_padding`; "" if none.
    """

    network: str
    against: str
    differences: dict[str, float]
    parameters: int
    padding: str = ""

    def lines(self) -> list[str]:
        """Returns the result as sentences for the log and the model card."""
        read = f"Read back {self.parameters} arrays, all bitwise equal."
        if not self.against:
            return [f"{read} Outputs were not compared with PyTorch."]
        shown = [f"{name}: {value:.1e}" for name, value in self.differences.items()]
        return [
            read,
            f"Largest difference from {self.against} in float32 on {_ROWS} rows of random tokens "
            f"(limit: the larger of {LIMIT:.0e} and {_SHARE:.0e} of the largest output): "
            f"{'; '.join(shown)}.",
        ]


def check_parity(
    folder: Path,
    network: Network,
    name: str = "main",
    *,
    compare: bool = True,
    texts: Sequence[Sequence[str]] = (),
) -> ParityReport:
    """Checks that an exported folder holds `network`.

    Args:
      compare: whether to compare outputs with PyTorch, if it is installed. The arrays are always
        read back and compared.
      texts: examples for the labels of a fine-tuned model, each of one text or two; rows of random
        tokens if empty.

    Raises:
      ParityError: an array that was read back differs, or outputs differ by more than the limit.
    """
    parameters = _check_read_back(folder, network)
    masked, where = network.masked, ("Hugging Face's ConvBERT class", _REMEDY)
    if not (compare and pytorch_is_there()):
        padding = describe_padding(network, *where, measured=compare) if masked else ""
        return ParityReport(name, "", {}, parameters, padding)
    pad_id = huggingface.read_config(folder).get("pad_token_id") or 0
    tokens, mask, types = sample_inputs(network, pad_id)
    kinds = {"full": np.ones_like(mask), "padded": mask}
    ours = {kind: our_outputs(network, tokens, m, types) for kind, m in kinds.items()}
    theirs = {
        kind: pytorch_outputs(folder, network, tokens, m, types, masked and kind == "padded")
        for kind, m in kinds.items()
    }
    leaks = network.family in READ_PADDING and not masked
    differences, limits = {}, {}
    for output, numbers in theirs["full"].items():
        differences[output] = _largest(ours["full"][output], numbers)
        limits[output] = max(LIMIT, _SHARE * float(np.abs(numbers).max()))
        # If convolutions read padding, outputs at padding must agree too.
        rows = np.ones_like(mask) if leaks else mask
        limits[f"{output}, padded"] = limits[output]
        differences[f"{output}, padded"] = _largest(
            ours["padded"][output], theirs["padded"][output], rows
        )
    padding = ""
    if masked:
        padding = describe_padding(network, *where, labels=_describe_labels(folder, network, texts))
    against = _versions(huggingface.architecture(network))
    if masked:
        against += f", on padded rows from Masked{huggingface.architecture(network)}"
    report = ParityReport(name, against, differences, parameters, padding)
    wrong = {out: value for out, value in differences.items() if not value <= limits[out]}
    if wrong:
        raise ParityError(
            f"{folder} failed the parity check with PyTorch: "
            + ", ".join(
                f"{out} differs by {value:.1e} (limit {limits[out]:.0e})"
                for out, value in wrong.items()
            )
            + ". Do not use these weights; report this as a bug of convbert_jax.",
            path=folder,
        )
    return report


def check_logits(folder: Path, config: LanguageModelConfig, params: Any) -> list[str]:
    """Checks that Lfm2ForCausalLM computes the logits of a language model, if PyTorch is installed.

    Args:
      folder: with the weights of the model in the format of transformers.

    Returns:
      The result as sentences for the log and the model card.

    Raises:
      ParityError: logits differ by more than the limit.
    """
    if not pytorch_is_there():
        return ["Logits were not compared with PyTorch."]
    import torch
    import transformers

    length = min(_LENGTH, config.tokens.positions)
    tokens = np.random.default_rng(_SEED).integers(0, config.tokens.vocab_size, (_ROWS, length))
    with _quiet():
        model = transformers.Lfm2ForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(config, nnx.Rngs(0))))

    @jax.jit
    def run(params, tokens):
        return nnx.merge(graphdef, params)(tokens, jnp.ones_like(tokens))

    with _precise_on_cpu():
        ours = np.asarray(run(jax.tree.map(jnp.asarray, params), tokens))
    largest, limit = _largest(ours, theirs), max(LIMIT, _SHARE * float(np.abs(theirs).max()))
    against = _versions("Lfm2ForCausalLM")
    if not largest <= limit:
        raise ParityError(
            f"{folder} failed the parity check with {against}: logits differ by {largest:.1e} "
            f"(limit {limit:.0e}). Do not use these weights; report this as a bug of convbert_jax.",
            path=folder,
        )
    return [
        f"Largest difference of logits from {against} in float32 on {_ROWS} rows of random tokens: "
        f"{largest:.1e} (limit {limit:.0e})."
    ]


def pytorch_is_there() -> bool:
    """Returns whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def describe_padding(
    network: Network, where: str, remedy: str, *, measured: bool = True, labels: str = ""
) -> str:
    """Describes how padded batches change a masked network in a class whose convolution reads them.

    Args:
      where, remedy: name of the class and a sentence with the fix, for the message.
      measured: whether to compute the largest difference, see `measure_padding`.
      labels: a sentence about changed predictions, ending in a space; or "".
    """
    by = f" by up to {measure_padding(network):.1e} (random tokens)" if measured else ""
    return (
        f"In padded batches, {where} changes the outputs of this model{by}: its convolutions read "
        f"padding, but this model was trained to ignore it. {labels}{remedy}"
    )


def measure_padding(network: Network) -> float:
    """Measures how much outputs at real tokens change if convolutions read padding.

    Returns:
      the largest absolute difference in a padded batch of random tokens.
    """
    tokens, mask, types = sample_inputs(network)
    ours = our_outputs(network, tokens, mask, types)
    theirs = our_outputs(network.with_masking(False), tokens, mask, types)
    return max(_largest(ours[output], theirs[output], mask) for output in ours)


def sample_inputs(
    network: Network, pad_id: int = 0, rows: int = _ROWS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns random (tokens, mask, types), each [B, L]; half of the rows are right-padded."""
    rng = np.random.default_rng(_SEED)
    e = network.embeddings
    length = min(_LENGTH, e.positions)
    tokens = rng.integers(0, e.vocab_size, (rows, length))
    types = rng.integers(0, max(1, e.types), (rows, length))
    real = np.concatenate([np.full(rows // 2, length), rng.integers(1, length, rows // 2)])
    mask = (np.arange(length) < real[:, None]).astype(np.int64)
    return np.where(mask, tokens, pad_id), mask, np.where(mask, types, 0)


def changed_labels(
    folder: Path, network: Network, texts: Sequence[Sequence[str]] = ()
) -> tuple[int, int]:
    """Counts predictions of the PyTorch class that differ because its convolutions read padding.

    Predictions are labels of rows, tags of real tokens, or answer spans, in one batch padded to
    its longest row.

    Returns:
      (number of changed predictions, number of predictions).
    """
    tokens, mask, types = example_batch(folder, network, texts)
    head = next(head for head in huggingface.TUNED if network.has(head))
    theirs = pytorch_outputs(folder, network, tokens, mask, types)[head]
    ours = our_outputs(network, tokens, mask, types)[head]
    if head == "span_head":  # start and end, among real tokens
        hidden = np.where(mask[..., None], 0, -np.inf)
        pairs = [(x + hidden).argmax(1) for x in (ours, theirs)]
        return int((pairs[0] != pairs[1]).any(-1).sum()), len(tokens)
    differs = ours.argmax(-1) != theirs.argmax(-1)
    if head == "token_head":
        return int((differs & mask.astype(bool)).sum()), int(mask.sum())
    return int(differs.sum()), len(tokens)


def _describe_labels(folder: Path, network: Network, texts: Sequence[Sequence[str]]) -> str:
    if not any(network.has(head) for head in huggingface.TUNED):
        return ""
    if network.has("sequence_head") and len(network.labels) == 1:
        return ""  # a regression output, which `measure_padding` covers
    changed, count = changed_labels(folder, network, texts)
    named = "predictions for real text" if texts else "predictions for random tokens"
    return f"In one such batch, {changed} of {count} {named} change. "


def example_batch(folder: Path, network: Network, texts: Sequence[Sequence[str]]):
    """Returns (tokens, mask, types), each [B, L], padded to the longest row.

    Args:
      texts: as in `check_parity`.
    """
    if not texts:
        return sample_inputs(
            network, huggingface.read_config(folder).get("pad_token_id") or 0, _BATCH
        )
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    length = min(network.use.get("finetune.length", _LENGTH), network.embeddings.positions)
    columns = [list(column) for column in zip(*texts[:_BATCH], strict=True)]
    batch = tokenizer(
        *columns, padding=True, truncation=True, max_length=length, return_tensors="np"
    )
    tokens = batch["input_ids"]
    return tokens, batch["attention_mask"], batch.get("token_type_ids", np.zeros_like(tokens))


def our_outputs(network: Network, tokens, mask, types) -> dict[str, np.ndarray]:
    """Returns the outputs of `modules.forward`, on the CPU with full float32 matmuls."""
    with _precise_on_cpu():
        outputs = forward(network)(tokens, mask, types)
        return {name: np.asarray(value) for name, value in outputs.items()}


@contextlib.contextmanager
def _precise_on_cpu():
    """Selects the CPU, unless JAX_PLATFORMS excludes it, and full float32 matmuls."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        yield


def load_class(folder: Path, network: Network, *, masked: bool = False, **options: Any):
    """Loads a folder with its class of transformers, or the class that ignores padding.

    Args:
      masked: whether to use `modeling_masked_convbert`.
      options: of `from_pretrained`.
    """
    import transformers

    name, module = huggingface.architecture(network), transformers
    if masked:
        from convbert_jax.interop import modeling_masked_convbert as module

        name = f"Masked{name}"
    with _quiet():
        return getattr(module, name).from_pretrained(folder, **options).float().eval()


def pytorch_outputs(
    folder: Path, network: Network, tokens, mask, types, masked: bool = False
) -> dict[str, np.ndarray]:
    """Returns the outputs of `load_class`, named as in `our_outputs`."""
    import torch

    name = huggingface.architecture(network)
    model = load_class(folder, network, masked=masked)
    with torch.no_grad():
        inputs = {"input_ids": tokens, "attention_mask": mask}
        inputs |= {"token_type_ids": types} if network.embeddings.types else {}
        tensors = {name: torch.tensor(array) for name, array in inputs.items()}
        outputs = model(**tensors, output_hidden_states=True)
        results = {"hidden": outputs.hidden_states[-1]}
        if "seq_relationship_logits" in outputs:  # BertForPreTraining
            results["mlm_head"] = outputs.prediction_logits
            results["pair_head"] = outputs.seq_relationship_logits
        else:
            for head, suffix in huggingface.CLASSES.items():
                if name.endswith(suffix):
                    results[head] = _logits(torch, outputs)
        if unclassed := huggingface.unclassed_heads(network):
            read = huggingface.read_folder(folder).networks["main"]
            for head in unclassed:
                results[head] = _compute_head(torch, read, head, results["hidden"])
        return {name: value.numpy() for name, value in results.items()}


def _logits(torch, outputs):
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits


def _compute_head(torch, network: Network, head: str, hidden):
    """Computes a head that the family lacks: rtd_head as in Electra, pair_head as in Bert."""

    def dense(name, x):
        kernel = torch.tensor(network.parameters[f"{head}/{name}/kernel"])
        return x @ kernel + torch.tensor(network.parameters[f"{head}/{name}/bias"])

    if head == "pair_head":
        return dense("output", torch.tanh(dense("dense", hidden[:, 0])))
    return dense("output", torch.nn.functional.gelu(dense("dense", hidden)))[..., 0]


def _check_read_back(folder: Path, network: Network) -> int:
    back = huggingface.read_folder(folder).networks["main"]
    differing = [
        path
        for path, array in network.parameters.items()
        if path not in back.parameters or not np.array_equal(back.parameters[path], array)
    ]
    differing += sorted(back.parameters.keys() - network.parameters.keys())
    if differing:
        raise ParityError(
            f"{folder} does not read back as it was written; the first differing array is "
            f"{differing[0]}. Check the disk and the memory of this machine, then export again.",
            path=folder,
        )
    return len(network.parameters)


def _largest(ours: np.ndarray, theirs: np.ndarray, rows: np.ndarray | None = None) -> float:
    difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    if rows is not None and difference.shape[:2] == rows.shape:
        difference = difference[rows.astype(bool)]
    return float(difference.max())


def _versions(name: str) -> str:
    import torch
    import transformers

    return f"{name} (transformers {transformers.__version__}, torch {torch.__version__})"


@contextlib.contextmanager
def _quiet():
    """Silences transformers' report of unexpected tensors, which the model card lists."""
    import transformers

    before = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()


CARD = "README.md"


def write_card(
    network: Network,
    *,
    title: str,
    made_by: str,
    report: ParityReport,
    notes: Sequence[str],
    vectors: VectorConfig | None = None,
) -> str:
    """Returns the model card of a network as Markdown.

    Args:
      title: name of the run and role of the network.
      made_by: origin of the weights, one sentence.
      report: result of the parity check.
      notes: further paragraphs.
      vectors: how the network computes vectors, if the folder has files for sentence-transformers.
    """
    name = huggingface.architecture(network)
    layer, embeddings, encoder = network.layer, network.embeddings, network.encoder
    count = sum(array.size for array in network.parameters.values())
    parts = [
        f"---\nlibrary_name: {'sentence-' if vectors else ''}transformers\ntags:\n"
        f"- {network.family}\n---",
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
        _python(huggingface.auto_class(name), vectors, network.masked),
        *_describe_use(network, name),
        *([report.padding] if report.padding else []),
        *notes,
        "## Parity\n\n" + "\n".join(f"- {line}" for line in report.lines()),
    ]
    return "\n\n".join(parts) + "\n"


def _python(auto_class: str, vectors: VectorConfig | None, masked: bool) -> str:
    """Returns the Python code that loads a folder."""
    trusted = ", trust_remote_code=True" if masked else ""
    lines = [
        f"from transformers import AutoTokenizer, {auto_class}\n",
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
        f'model = {auto_class}.from_pretrained("FOLDER"{trusted})',
    ]
    if vectors:
        prompt = f", prompt_name={next(iter(vectors.prompts))!r}" if vectors.prompts else ""
        lines = [
            "from sentence_transformers import SentenceTransformer\n",
            f'model = SentenceTransformer("FOLDER"{trusted})',
            f'vectors = model.encode(["A text.", "Another text."]{prompt})',
        ]
    return "\n".join(["```python", *lines, "```"])


def _describe_use(network: Network, name: str) -> list[str]:
    said = []
    if network.use.get("outputs.texts"):
        said.append(_describe_input(network))
    if "rtd_head" in huggingface.unclassed_heads(network):
        said.append(
            "The four `discriminator_predictions.*` tensors are the head for replaced-token "
            f"detection. No {name.removesuffix('Model')} class has this head, so transformers "
            "reports the tensors as UNEXPECTED and ignores them; convbert_jax loads them."
        )
    if "pair_head" in huggingface.unclassed_heads(network):
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


def _describe_input(network: Network) -> str:
    use = network.use
    columns, length = use.get("outputs.columns"), use.get("finetune.length")
    told = "two texts, `tokenizer(first, second)`" if use["outputs.texts"] == 2 else "one text"
    if columns:
        told += f", from {' and '.join(f'`{column}`' for column in columns)} of its training files"
    if length:
        told += f". Fine-tuning used at most {length} tokens, including special tokens"
    return f"The input is {told}."
