"""Distillation losses of pre-training, configured by config.distillation.

Terms of DistilBERT (Sanh et al., 2019, §2) and TinyBERT (Jiao et al., 2020, §3.1). Student and
teacher read the same tokens; the teacher is frozen and deterministic. Losses are averaged over real
tokens and over the compared layers, so that weights do not depend on the number of layers
(TinyBERT sums over layers).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from convbert_jax.config import Config, DistillationSection, EncoderConfig
from convbert_jax.objectives import metrics


class Observed(NamedTuple):
    """Activations of a network by layer; None if not requested or if a layer has no attention."""

    embeddings: Float[Array, "B L E"]
    hidden: tuple[Float[Array, "B L C"] | None, ...]
    attention: tuple[Float[Array, "B H L L"] | None, ...]


# (tokens, segment_ids, type_ids) -> the observed activations, and a function that returns logits:
# head(positions [B, M]) word logits [B, M, V], head(None) replaced-token logits [B, L].
Teacher = Callable[..., tuple[Observed, Callable[[Array | None], Array]]]


def pairs(rule: str, student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """Return the compared pairs (student layer, teacher layer), counted from 0.

    Args:
      rule: A value of config.distillation.layers.
      student, teacher: Numbers of layers; only with "last" may the student have more.
    """
    return LAYERS[rule](student, teacher)


LAYERS = {
    "last": lambda student, teacher: ((student - 1, teacher - 1),),
    "uniform": lambda student, teacher: tuple(
        (i, (i + 1) * teacher // student - 1) for i in range(student)
    ),
    "top": lambda student, teacher: tuple((i, teacher - student + i) for i in range(student)),
    "bottom": lambda student, teacher: tuple((i, i) for i in range(student)),
}


def captures(section: DistillationSection) -> tuple[str, ...]:
    """Return the activations to capture in both networks (models/capture.py)."""
    wanted = ()
    if section.hidden_weight and section.layers != "last":
        wanted += ("hidden",)
    if section.attention_weight:
        wanted += (ATTENTION[section.attention][0],)
    return wanted


def observe(
    section: DistillationSection,
    encoder: EncoderConfig,
    encode: Callable[..., Any],
    embeddings: Float[Array, "B L E"],
) -> tuple[Float[Array, "B L C"], Observed]:
    """Compute the last layer's hidden states and the activations to compare.

    Args:
      encode: (capture=...) -> hidden states; with a capture, also each stage's activations.
    """
    wanted = captures(section)
    hidden, seen = encode(capture=wanted) if wanted else (encode(), ({},) * len(encoder.stages))

    def of_layers(name):
        layers = []
        for stage, found in zip(encoder.stages, seen, strict=True):
            given = found.get(name)
            layers += [None if given is None else given[i] for i in range(stage.depth)]
        return layers

    attention = of_layers(ATTENTION[section.attention][0])
    return hidden, Observed(embeddings, (*of_layers("hidden")[:-1], hidden), tuple(attention))


def observe_student(model: nnx.Module, inputs, key: Array | None, dtype, config: Config):
    """Apply `observe` to a pre-training model through its `encode` and `embed`."""

    def encode(**capture):
        return model.encode(*inputs, dtype=dtype, key=key, **capture)

    embeddings = model.embed(*inputs, dtype=dtype)
    return observe(config.distillation, config.encoder, encode, embeddings)


def terms(
    section: DistillationSection,
    student: Observed,
    teacher: Observed,
    segment_ids: Int[Array, "B L"],
    project: Callable[[str, Array], Array],
) -> tuple[Array, metrics.Metrics]:
    """Compute the weighted sum of the distillation losses, and each loss; logits are not included.

    Args:
      project: (name, student activations) -> activations of the teacher's width.
    """
    real = segment_ids != 0
    compared = pairs(section.layers, len(student.hidden), len(teacher.hidden))
    found = {}
    if section.hidden_weight:
        distances = [
            HIDDEN[section.hidden](project("hidden", student.hidden[ours]), teacher.hidden[theirs])
            for ours, theirs in compared
        ]
        found["hidden"] = metrics.mean(sum(distances) / len(distances), real)
    if section.attention_weight:
        distance = ATTENTION[section.attention][1]
        distances = [
            distance(student.attention[ours], teacher.attention[theirs], segment_ids)
            for ours, theirs in compared
            if student.attention[ours] is not None and teacher.attention[theirs] is not None
        ]
        found["attention"] = metrics.mean(sum(distances) / len(distances), real)
    if section.embeddings_weight:
        ours = project("embeddings", student.embeddings)
        found["embeddings"] = metrics.mean(squared(ours, teacher.embeddings), real)
    value = jnp.zeros(())
    for name, sums in found.items():
        value += getattr(section, f"{name}_weight") * metrics.ratio(sums)
    return value, {f"distill_{name}": sums for name, sums in found.items()}


def word_divergence(
    student: Float[Array, "*B V"], teacher: Float[Array, "*B V"], temperature: float
) -> Float[Array, "*B"]:
    """Compute T^2 times KL(teacher || student) of softmax(logits / T).

    Its gradient is that of the soft cross-entropy, on the scale of the hard one (Hinton et al.,
    2015).
    """
    ours = jax.nn.log_softmax(student / temperature)
    theirs = jax.nn.log_softmax(teacher / temperature)
    return temperature**2 * (jnp.exp(theirs) * (theirs - ours)).sum(-1)


def token_divergence(
    student: Float[Array, "*B"], teacher: Float[Array, "*B"], temperature: float
) -> Float[Array, "*B"]:
    """Compute the binary form of `word_divergence`, with sigmoid(logits / T), per token."""
    ours, theirs = student / temperature, teacher / temperature
    share = jax.nn.sigmoid(theirs)
    replaced = share * (jax.nn.log_sigmoid(theirs) - jax.nn.log_sigmoid(ours))
    original = (1 - share) * (jax.nn.log_sigmoid(-theirs) - jax.nn.log_sigmoid(-ours))
    return temperature**2 * (replaced + original)


def cosine(ours: Float[Array, "B L C"], theirs: Float[Array, "B L C"]) -> Float[Array, "B L"]:
    """Compute 1 - cosine similarity (DistilBERT)."""
    a, b = (x.astype(jnp.float32) for x in (ours, theirs))
    norms = jnp.square(a).sum(-1) * jnp.square(b).sum(-1)
    return 1 - (a * b).sum(-1) * jax.lax.rsqrt(norms + 1e-12)


def squared(ours: Float[Array, "B L C"], theirs: Float[Array, "B L C"]) -> Float[Array, "B L"]:
    """Compute the mean squared difference (TinyBERT)."""
    return jnp.square(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).mean(-1)


def map_divergence(
    ours: Float[Array, "B H L L"],
    theirs: Float[Array, "B H_teacher L L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L"]:
    """Compute KL(teacher || student) of attention maps averaged over heads, for each query.

    Heads of two networks do not correspond. Their mean is a distribution over keys for any number
    of heads, also for the few heads of a mixed block.
    """
    ours, theirs = ours.mean(1), theirs.mean(1)
    logarithms = jnp.log(jnp.maximum(theirs, _LEAST)) - jnp.log(jnp.maximum(ours, _LEAST))
    return (theirs * logarithms).sum(-1)


def score_distance(
    ours: Float[Array, "B H L L"],
    theirs: Float[Array, "B H L L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L"]:
    """Compute the mean squared difference of scores over heads and visible keys (TinyBERT).

    Scores are the attention logits before the softmax.
    """
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]).astype(jnp.float32)
    squares = jnp.square(ours - theirs).mean(1) * visible
    return squares.sum(-1) / visible.sum(-1)


_LEAST = 1e-9  # lower bound of mean attention weights inside logarithms
# config.distillation.hidden -> distance between two hidden states
HIDDEN = {"cosine": cosine, "mse": squared}
# config.distillation.attention -> (capture name in models/capture.py, distance)
ATTENTION = {"maps": ("attention", map_divergence), "scores": ("scores", score_distance)}
