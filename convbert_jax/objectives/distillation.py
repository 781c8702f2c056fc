"""What a student learns of a teacher in pre-training: the terms of DistilBERT (Sanh et al., 2019,
§2) and TinyBERT (Jiao et al., 2020, §3.1), by config.distillation.

Both read the same tokens; the teacher is deterministic and learns nothing. Means are over tokens
that are no padding, then over the layers that are compared, so that a weight does not depend on how
many these are (TinyBERT adds them up).
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
    """What a network made of a batch; layers from the first, None where nobody asked or where a
    layer has no attention.
    """

    embeddings: Float[Array, "B L E"]
    hidden: tuple[Float[Array, "B L C"] | None, ...]
    attention: tuple[Float[Array, "B H L L"] | None, ...]


# (tokens, segment_ids, type_ids) -> what it makes of them, and logits for each token to give:
# head(positions [B, M]) [B, M, V] of words, head(None) [B, L] of whether a token looks replaced
Teacher = Callable[..., tuple[Observed, Callable[[Array | None], Array]]]


def pairs(rule: str, student: int, teacher: int) -> tuple[tuple[int, int], ...]:
    """(layer of the student, layer of the teacher) that are compared, counted from 0.

    Args:
      rule: config.distillation.layers.
      student, teacher: how many layers they have; only for "last" the student may have more.
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
    """What the layers of both networks are to hand out (models/capture.py)."""
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
    """The hidden states of the last layer, and what is compared.

    Args:
      encode: (capture=...) -> hidden states, with a capture also what the layers of each stage saw.
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
    """`observe` of a model to pre-train, by its `encode` and `embed`."""

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
    """What is added to the loss, and its parts; those of logits are not among them.

    Args:
      project: (part, the student's) -> as wide as the teacher's.
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
        value += getattr(section, f"{name}_weight") * sums[0] / (sums[1] + 1e-6)
    return value, {f"distill_{name}": sums for name, sums in found.items()}


def word_divergence(
    student: Float[Array, "*B V"], teacher: Float[Array, "*B V"], temperature: float
) -> Float[Array, "*B"]:
    """T^2 times the Kullback-Leibler divergence of the teacher's softmax(logits / T) from ours: the
    gradient is that of the soft cross-entropy, on the scale of the hard one (Hinton et al., 2015).
    """
    ours = jax.nn.log_softmax(student / temperature)
    theirs = jax.nn.log_softmax(teacher / temperature)
    return temperature**2 * (jnp.exp(theirs) * (theirs - ours)).sum(-1)


def token_divergence(
    student: Float[Array, "*B"], teacher: Float[Array, "*B"], temperature: float
) -> Float[Array, "*B"]:
    """The same of two outcomes, by sigmoid(logits / T): does a token look replaced or not."""
    ours, theirs = student / temperature, teacher / temperature
    share = jax.nn.sigmoid(theirs)
    replaced = share * (jax.nn.log_sigmoid(theirs) - jax.nn.log_sigmoid(ours))
    original = (1 - share) * (jax.nn.log_sigmoid(-theirs) - jax.nn.log_sigmoid(-ours))
    return temperature**2 * (replaced + original)


def cosine(ours: Float[Array, "B L C"], theirs: Float[Array, "B L C"]) -> Float[Array, "B L"]:
    """1 - the cosine of both vectors (DistilBERT)."""
    a, b = (x.astype(jnp.float32) for x in (ours, theirs))
    norms = jnp.square(a).sum(-1) * jnp.square(b).sum(-1)
    return 1 - (a * b).sum(-1) * jax.lax.rsqrt(norms + 1e-12)


def squared(ours: Float[Array, "B L C"], theirs: Float[Array, "B L C"]) -> Float[Array, "B L"]:
    """Mean of the squared differences (TinyBERT)."""
    return jnp.square(ours.astype(jnp.float32) - theirs.astype(jnp.float32)).mean(-1)


def map_divergence(
    ours: Float[Array, "B H L L"],
    theirs: Float[Array, "B H_teacher L L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L"]:
    """Kullback-Leibler divergence of the mean of the teacher's maps from that of ours, of each
    query. Over heads nothing corresponds between networks; their mean is a distribution of keys
    whatever the heads are, few of them beside convolutions too.
    """
    ours, theirs = ours.mean(1), theirs.mean(1)
    logarithms = jnp.log(jnp.maximum(theirs, _LEAST)) - jnp.log(jnp.maximum(ours, _LEAST))
    return (theirs * logarithms).sum(-1)


def score_distance(
    ours: Float[Array, "B H L L"],
    theirs: Float[Array, "B H L L"],
    segment_ids: Int[Array, "B L"],
) -> Float[Array, "B L"]:
    """Mean of the squared differences over heads and the keys that a query sees (TinyBERT, which
    compares what the softmax is taken of).
    """
    visible = (segment_ids[:, :, None] == segment_ids[:, None, :]).astype(jnp.float32)
    squares = jnp.square(ours - theirs).mean(1) * visible
    return squares.sum(-1) / visible.sum(-1)


_LEAST = 1e-9  # of a mean attention weight, inside logarithms
# config.distillation.hidden -> distance of two hidden states
HIDDEN = {"cosine": cosine, "mse": squared}
# config.distillation.attention -> (what it compares, by its name in models/capture.py; how)
ATTENTION = {"maps": ("attention", map_divergence), "scores": ("scores", score_distance)}
