"""Low-rank adaptation of an encoder (LoRA, Hu et al. 2021, arXiv 2106.09685).

A target is a kernel W of shape [..., inputs, outputs], whose leading axes are layers and groups.
W stays constant, and the model uses W + (alpha / rank) A B. Training updates the head and the
factors A [..., inputs, rank] and B [..., rank, outputs] of each layer and group. They are at the
path of the kernel, as `encoder/stages/0/mixer/query/kernel/lora_a`.
"""

import math
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import traverse_util

from convbert_jax.config import Config, ConfigError
from convbert_jax.interfaces import REPLICATED, Rules
from convbert_jax.training.optimizer import MATRIX
from convbert_jax.training.partitioning import Params, flatten_params
from convbert_jax.training.train_step import fold_in_name

_A, _B = "lora_a", "lora_b"
_STAGE = re.compile(r"^encoder/stages/\d+/")

# Factors are small: 6,144 values per layer for rank 8 and 768 channels.
RULES: Rules = ((rf"/({_A}|{_B})$", REPLICATED),)


def find_targets(params: Params, targets: tuple[str, ...]) -> list[str]:
    """Return the paths of the kernels that `targets` select.

    Args:
      params: Arrays or `jax.ShapeDtypeStruct`s with `encoder/`.
      targets: `config.finetune.lora_targets`.

    Raises:
      ConfigError: A target selects no kernel.
    """
    matrices = {path: _STAGE.sub("", path) for path in flatten_params(params) if _is_target(path)}
    found = {
        target: [path for path, name in matrices.items() if f"{name}/".startswith(f"{target}/")]
        for target in targets
    }
    for target, paths in found.items():
        if not paths:
            names = sorted({name.removesuffix("/kernel") for name in matrices.values()})
            raise ConfigError(
                f"contains '{target}', but no layer of the encoder has this kernel. Choose from "
                f"mixer, feed_forward, {', '.join(names)}.",
                field="config.finetune.lora_targets",
                value=targets,
            )
    return sorted({path for paths in found.values() for path in paths})


def start(params: Params, key: jax.Array, rank: int, targets: tuple[str, ...]) -> Params:
    """Return the trained parameters before the first step: the head of `params`, and factors.

    A is normal as in the paper, which does not give a deviation. Here it is 1 / sqrt(inputs), so
    x A has the variance of x. B is zero, so W + (alpha / rank) A B = W at step 0.

    Args:
      params: Complete parameters of a fine-tuned model.
    """
    flat, factors = flatten_params(params), {}
    for path in find_targets(params, targets):
        *leading, inputs, outputs = flat[path].shape
        drawn = jax.random.normal(fold_in_name(key, path), (*leading, inputs, rank))
        factors[f"{path}/{_A}"] = drawn / math.sqrt(inputs)
        factors[f"{path}/{_B}"] = jnp.zeros((*leading, rank, outputs))
    return {"head": params["head"], **traverse_util.unflatten_dict(factors, sep="/")}


def scale_of(config: Config) -> float:
    """Return alpha / rank, or 0 without LoRA."""
    f = config.finetune
    return f.lora_alpha / f.lora_rank if f.lora_rank else 0.0


def merge(trained: Params, frozen: Sequence[Params], scale: float) -> Params:
    """Return the complete parameters, W + scale A B for each target.

    Args:
      trained: Head and factors, see `start`; without LoRA the complete parameters.
      frozen: The base weights with `embeddings` and `encoder`, or nothing without LoRA. Arrays of
        jax or numpy.
      scale: alpha / rank.
    """
    if not frozen:
        return trained
    (weights,) = frozen
    with jax.default_matmul_precision("highest"):  # a TPU would round the factors to bfloat16
        encoder = _add(weights["encoder"], trained["encoder"], scale)
    return {**weights, "encoder": encoder, "head": trained["head"]}


def _add(weights, factors, scale: float):
    if _A in factors:
        return weights + scale * (factors[_A] @ factors[_B])
    return weights | {name: _add(weights[name], part, scale) for name, part in factors.items()}


def _is_target(path: str) -> bool:
    return bool(_STAGE.match(path) and MATRIX.search(path))
