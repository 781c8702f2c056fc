"""Decoding settings of scored texts, as JSON and as one report line."""

from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax.config import Config
from convbert_jax.config.sequences.sections import DecodingSection

_OF_METHOD = {
    "beam": ("beam", "length_penalty"),
    "greedy": (),
    # of n_best samples, the one with the best score is used
    "sample": ("n_best", "length_penalty", "temperature", "top_k", "top_p"),
}


def collect(config: Config, steps: Sequence[int], dtype: str) -> dict[str, Any]:
    """Returns the settings that determine the generated texts, JSON-compatible.

    Args:
      steps: steps of the averaged checkpoints.
      dtype: dtype of the computation.
    """
    d = config.decoding
    drawn = {"seed": config.seed} if d.method == "sample" else {}
    return {
        "method": d.method,
        **{name: getattr(d, name) for name in _OF_METHOD[d.method]},
        **drawn,
        "length_ratio": d.length_ratio,
        "length_extra": d.length_extra,
        "checkpoints": list(steps),
        "dtype": dtype,
    }


def describe(settings: Mapping[str, Any]) -> str:
    """Formats the settings of `collect` as one line."""
    d = DecodingSection(
        **{name: value for name, value in settings.items() if hasattr(DecodingSection, name)}
    )
    how = {
        "beam": f"beam {d.beam}",
        "greedy": "greedy",
        "sample": f"sampled (temperature {d.temperature:g}, top k {d.top_k}, top p {d.top_p:g}, "
        f"seed {settings.get('seed')})",
    }[d.method]
    if d.method == "sample" and d.n_best > 1:
        how += f", the best of {d.n_best}"
    if d.method != "greedy" and (d.method == "beam" or d.n_best > 1):
        how += f", score / length^{d.length_penalty:g}"
    steps = settings["checkpoints"]
    checkpoints = f"checkpoint {steps[0]}"
    if len(steps) > 1:
        checkpoints = f"mean of {len(steps)} checkpoints, {steps[0]} to {steps[-1]}"
    most = f"at most {d.length_extra} tokens"
    if d.length_ratio:
        most = f"at most {d.length_ratio:g} x source tokens + {d.length_extra}"
    return f"{how}; {most}; {checkpoints}; {settings['dtype']}"
