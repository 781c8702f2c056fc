"""Proof that weights went over whole: the same inputs through two implementations.

Ours runs in float32 on the CPU. The other side is the PyTorch class that the folder is for, or,
where PyTorch is not installed, our own reader, which must give back every bit.
"""

import contextlib
import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from convbert_jax.interop.huggingface import config as huggingface_config
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.modules import forward
from convbert_jax.interop.networks import ConversionError, Network
from convbert_jax.interop.tables import READ_PADDING

LIMIT = 1e-4  # largest absolute difference, in float32,
_SHARE = 1e-5  # or this share of the largest number, where that is more
_ROWS, _LENGTH, _SEED = 4, 128, 0
_BATCH = 50  # rows whose labels are compared


class ParityError(ConversionError):
    """Two implementations of the same weights disagree."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Largest absolute difference of each output.

    Attributes:
      network: "main" or "generator".
      against: what it was compared with, in words; empty if only the reader was.
      differences: output -> difference, on full rows, and on padded ones where both read them.
      parameters: arrays that our reader gave back to the bit.
      padding: what padded batches do in the other class, see `describe_padding`; "" if nothing.
    """

    network: str
    against: str
    differences: dict[str, float]
    parameters: int
    padding: str = ""

    def lines(self) -> list[str]:
        """For the log and the model card."""
        read = f"{self.parameters} arrays read back, equal to the bit."
        if not self.against:
            return [f"{read} Outputs were not compared with PyTorch."]
        shown = [f"{name}: {value:.1e}" for name, value in self.differences.items()]
        return [
            read,
            f"Largest difference to {self.against} in float32, {_ROWS} rows of random tokens "
            f"(limit {LIMIT:.0e}, or {_SHARE:.0e} of the largest number): {'; '.join(shown)}.",
        ]


def certify(
    folder: Path,
    network: Network,
    name: str = "main",
    *,
    compare: bool = True,
    texts: Sequence[Sequence[str]] = (),
) -> Certificate:
    """Compares a folder with the network that it is to hold.

    Args:
      compare: outputs too, if PyTorch is installed; else only what our reader gives back.
      texts: examples for the labels of a fine-tuned model, each of one text or two; none: rows of
        random tokens.

    Raises:
      ParityError: our reader does not give the network back, or outputs differ by more than LIMIT.
    """
    parameters = _check_read_back(folder, network)
    masked, where = network.masked, "Hugging Face's ConvBERT class"
    if not (compare and pytorch_is_there()):
        padding = describe_padding(network, where, measured=compare) if masked else ""
        return Certificate(name, "", {}, parameters, padding)
    pad_id = huggingface_config.read(folder).get("pad_token_id") or 0
    tokens, mask, types = sample_inputs(network, pad_id)
    # On padded rows a masked convolution differs from theirs, see `describe_padding`.
    kinds = {"full": np.ones_like(mask)} | ({} if masked else {"padded": mask})
    theirs = {kind: pytorch_outputs(folder, network, tokens, m, types) for kind, m in kinds.items()}
    ours = {kind: our_outputs(network, tokens, m, types) for kind, m in kinds.items()}
    leaks = network.family in READ_PADDING
    differences, limits = {}, {}
    for output, numbers in theirs["full"].items():
        differences[output] = _largest(ours["full"][output], numbers)
        limits[output] = max(LIMIT, _SHARE * float(np.abs(numbers).max()))
        if masked:
            continue
        # Where padding leaks it is computed alike; without a convolution nobody reads it.
        rows = np.ones_like(mask) if leaks else mask
        limits[f"{output}, padded"] = limits[output]
        differences[f"{output}, padded"] = _largest(
            ours["padded"][output], theirs["padded"][output], rows
        )
    padding = ""
    if masked:
        padding = describe_padding(network, where, labels=_describe_labels(folder, network, texts))
    certificate = Certificate(name, _versions(network), differences, parameters, padding)
    wrong = {out: value for out, value in differences.items() if not value <= limits[out]}
    if wrong:
        raise ParityError(
            f"{folder} does not give the same numbers in PyTorch: "
            + ", ".join(
                f"{out} differs by {value:.1e}, more than {limits[out]:.0e}"
                for out, value in wrong.items()
            )
            + "; do not use it, and report this as a bug of convbert_jax.",
            path=folder,
        )
    return certificate


def pytorch_is_there() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def describe_padding(
    network: Network, where: str, *, measured: bool = True, labels: str = ""
) -> str:
    """What padded batches do to a network that does not read padding, in a class that does.

    Args:
      where: the class, in words.
      measured: whether the largest difference is computed.
      labels: what it does to predictions, a sentence.
    """
    by = f" by up to {measure_padding(network):.1e} (random tokens)" if measured else ""
    return (
        f"In padded batches, {where} changes the outputs of this model{by}: its convolutions read "
        f"padding, and this model was trained without. {labels}Give it one text at a time, or "
        "texts of one length; sentence-transformers, ONNX and pipelines with a batch_size pad."
    )


def measure_padding(network: Network) -> float:
    """Largest difference for real tokens between a network that ignores padding and the same
    weights with convolutions that read it, on random tokens in a padded batch.
    """
    tokens, mask, types = sample_inputs(network)
    ours = our_outputs(network, tokens, mask, types)
    theirs = our_outputs(network.with_masking(False), tokens, mask, types)
    return max(_largest(ours[output], theirs[output], mask) for output in ours)


def sample_inputs(
    network: Network, pad_id: int = 0, rows: int = _ROWS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, mask, types) [B, L]: random tokens, half of the rows padded to the right."""
    rng = np.random.default_rng(_SEED)
    e = network.embeddings
    length = min(_LENGTH, e.positions)
    tokens = rng.integers(0, e.vocab_size, (rows, length))
    types = rng.integers(0, e.types, (rows, length))
    real = np.concatenate([np.full(rows // 2, length), rng.integers(1, length, rows // 2)])
    mask = (np.arange(length) < real[:, None]).astype(np.int64)
    return np.where(mask, tokens, pad_id), mask, np.where(mask, types, 0)


def changed_labels(
    folder: Path, network: Network, texts: Sequence[Sequence[str]] = ()
) -> tuple[int, int]:
    """(predictions that padding changes in their class, all predictions): labels of rows, tags of
    real tokens, or answers, in one batch of rows padded to the longest.
    """
    tokens, mask, types = _batch_of(folder, network, texts)
    head = next(head for head in huggingface_config.TUNED if network.has(head))
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
    if not any(network.has(head) for head in huggingface_config.TUNED):
        return ""
    if network.has("sequence_head") and len(network.labels) == 1:
        return ""  # a number, among the outputs that are measured
    changed, count = changed_labels(folder, network, texts)
    named = "predictions for real text" if texts else "predictions for random tokens"
    return f"In one such batch, {changed} of {count} {named} change. "


def _batch_of(folder: Path, network: Network, texts: Sequence[Sequence[str]]):
    """(tokens, mask, types) [B, L], padded to the longest row."""
    if not texts:
        return sample_inputs(
            network, huggingface_config.read(folder).get("pad_token_id") or 0, _BATCH
        )
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    length = min(network.use.get("finetune.length", _LENGTH), network.embeddings.positions)
    columns = [list(column) for column in zip(*texts[:_BATCH], strict=True)]
    batch = tokenizer(
        *columns, padding=True, truncation=True, max_length=length, return_tensors="np"
    )
    return batch["input_ids"], batch["attention_mask"], batch["token_type_ids"]


def our_outputs(network: Network, tokens, mask, types) -> dict[str, np.ndarray]:
    """Outputs of `modules.forward`, on the CPU with products in full float32."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_matmul_precision("highest"))
        with contextlib.suppress(RuntimeError):  # a process that was told to know no CPU
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
        outputs = forward(network)(tokens, mask, types)
        return {name: np.asarray(value) for name, value in outputs.items()}


def pytorch_outputs(folder: Path, network: Network, tokens, mask, types) -> dict[str, np.ndarray]:
    """Outputs of the PyTorch class for a network, filled from a folder, by our names."""
    import torch
    import transformers

    name = huggingface_config.architecture(network)
    with _quiet():
        model = getattr(transformers, name).from_pretrained(folder).float().eval()
    with torch.no_grad():
        outputs = model(
            input_ids=torch.tensor(tokens),
            attention_mask=torch.tensor(mask),
            token_type_ids=torch.tensor(types),
            output_hidden_states=True,
        )
        results = {"hidden": outputs.hidden_states[-1]}
        if "seq_relationship_logits" in outputs:  # BertForPreTraining
            results["mlm_head"] = outputs.prediction_logits
            results["pair_head"] = outputs.seq_relationship_logits
        else:
            for head, suffix in huggingface_config.CLASSES.items():
                if name.endswith(suffix):
                    results[head] = _logits(torch, outputs)
        if unclassed := huggingface_config.unclassed_heads(network):
            read = huggingface.read_folder(folder).networks["main"]
            for head in unclassed:
                results[head] = _compute_head(torch, read, head, results["hidden"])
        return {name: value.numpy() for name, value in results.items()}


def _logits(torch, outputs):
    if "start_logits" in outputs:
        return torch.stack([outputs.start_logits, outputs.end_logits], dim=-1)
    return outputs.logits


def _compute_head(torch, network: Network, head: str, hidden):
    """A head that no class of this family has, as Electra's class computes rtd_head and Bert's
    pair_head."""

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
            f"{folder} does not read back as it was written, first {differing[0]}; the disk or "
            "its memory is at fault, write it again.",
            path=folder,
        )
    return len(network.parameters)


def _largest(ours: np.ndarray, theirs: np.ndarray, rows: np.ndarray | None = None) -> float:
    difference = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
    if rows is not None and difference.shape[:2] == rows.shape:
        difference = difference[rows.astype(bool)]
    return float(difference.max())


def _versions(network: Network) -> str:
    import torch
    import transformers

    name = huggingface_config.architecture(network)
    return f"{name} (transformers {transformers.__version__}, torch {torch.__version__})"


@contextlib.contextmanager
def _quiet():
    """Without the report of tensors that a class has no place for: the card names them."""
    import transformers

    before = transformers.logging.get_verbosity()
    try:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield
    finally:
        transformers.logging.set_verbosity(before)
        transformers.logging.enable_progress_bar()
