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
_LEAK = "Their convolutions read padding, ours were trained not to."
_INSTEAD = (
    "Give their class rows one at a time, or batches of one length; or train with "
    "config.model.mask_convolution=false and config.data.layout=electra, and padding does the same "
    "in both."
)


class ParityError(ConversionError):
    """Two implementations of the same weights disagree."""


@dataclasses.dataclass(frozen=True)
class Certificate:
    """Largest absolute difference of each output.

    Attributes:
      network: "main" or "generator".
      against: what it was compared with, in words; empty if only the reader was.
      differences: output -> difference, on full rows, and on padded ones where both read them.
      padding: how far padding moves the outputs of real tokens in their class; None if it is the
        same in ours, or was not measured.
      parameters: arrays that our reader gave back to the bit.
      leaks: padding changes outputs in their class, and not in ours.
      labels: what padding does to the predictions of a fine-tuned model there, in words.
    """

    network: str
    against: str
    differences: dict[str, float]
    padding: float | None
    parameters: int
    leaks: bool = False
    labels: str = ""

    def lines(self) -> list[str]:
        """For the log and the model card."""
        read = f"{self.parameters} arrays read back, equal to the bit."
        if not self.against:
            lines = [f"{read} Outputs were not compared with PyTorch."]
            return [*lines, f"{_LEAK} {_INSTEAD}"] if self.leaks else lines
        shown = [f"{name}: {value:.1e}" for name, value in self.differences.items()]
        lines = [
            read,
            f"Largest difference to {self.against} in float32, {_ROWS} rows of random tokens "
            f"(limit {LIMIT:.0e}, or {_SHARE:.0e} of the largest number): {'; '.join(shown)}.",
        ]
        if self.padding is not None:
            lines.append(
                f"{_LEAK} In the same test, padding moves their outputs for real tokens by up to "
                f"{self.padding:.1e}. {self.labels}{_INSTEAD}"
            )
        return lines


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
    masked = network.masked
    if not (compare and pytorch_is_there()):
        return Certificate(name, "", {}, None, parameters, masked)
    pad_id = huggingface_config.read(folder).get("pad_token_id") or 0
    tokens, mask, types = sample_inputs(network, pad_id)
    kinds = {"full": np.ones_like(mask), "padded": mask}
    theirs = {kind: pytorch_outputs(folder, network, tokens, m, types) for kind, m in kinds.items()}
    ours = {kind: our_outputs(network, tokens, m, types) for kind, m in kinds.items()}
    leaks = network.family in READ_PADDING
    differences, moved, labels, limits = {}, None, "", {}
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
    if masked:
        moved = max(_largest(ours["padded"][o], theirs["padded"][o], mask) for o in theirs["full"])
        labels = _describe_labels(folder, network, texts)
    against = _versions(network)
    certificate = Certificate(name, against, differences, moved, parameters, masked, labels)
    wrong = {out: value for out, value in differences.items() if not value <= limits[out]}
    if wrong:
        raise ParityError(
            f"{folder} does not give the same numbers in PyTorch: "
            + ", ".join(
                f"{out} differs by {value:.1e}, more than {limits[out]:.0e}"
                for out, value in wrong.items()
            )
            + "; do not use it, and report this as a bug of convbert_jax."
        )
    return certificate


def pytorch_is_there() -> bool:
    return all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


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
        return ""  # a number, which the line before tells of
    changed, count = changed_labels(folder, network, texts)
    named = "predictions for real text" if texts else "predictions for random tokens"
    return f"Of {count} {named} in one padded batch {changed} change with it. "


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
            "its memory is at fault, write it again."
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
