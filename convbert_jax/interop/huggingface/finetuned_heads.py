"""Conversion of heads of fine-tuned models to equivalent heads of transformers classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from convbert_jax.config import Config, OutputsSection

# config.outputs.head -> head of a network; transformers has no equivalent of other heads
NAMES = {
    "sequence": "sequence_head",
    "first_token": "first_token_head",  # see as_sequence_head
    "token": "token_head",
    "span": "span_head",
}
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
    name = f"{NAMES.get(outputs.head, outputs.head)}/output/"
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
