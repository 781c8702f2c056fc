"""Traces ops, models and objectives with checked signatures (tests/test_shapes.py).

Covers every CPU implementation of an op, forward and backward, and each mixer with one
pre-training loss and in one generative model. Nothing is compiled. Runs in a separate process,
because signatures are checked from import on, and other tests pass wrong shapes on purpose.
"""

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jaxtyping
from beartype import beartype

from tests.refusals import refused

CHECKED = ("ops", "models", "objectives", "decoding")


def check_arrays(function: Callable) -> Callable:
    """Applies beartype to array annotations only."""
    function.__annotations__ = {
        name: hint if _is_of_arrays(hint) else object
        for name, hint in function.__annotations__.items()
    }
    return beartype(function)


def _is_of_arrays(hint: object) -> bool:
    parts = getattr(hint, "__args__", ())
    return isinstance(hint, type(jaxtyping.AbstractArray)) or any(map(_is_of_arrays, parts))


def trace(function: Callable, *shapes: jax.ShapeDtypeStruct) -> None:
    """Traces `function` and its gradient for arrays of these shapes."""

    def both(*arrays):
        out, pull = jax.vjp(function, *arrays)
        return pull(jax.tree.map(jnp.ones_like, out))

    jax.eval_shape(both, *shapes)


def trace_ops() -> None:
    from convbert_jax.ops.attention import attention
    from convbert_jax.ops.convolution import depthwise_conv, dynamic_conv, span_dynamic_conv
    from convbert_jax.ops.embedding import embedding_lookup

    ids = jnp.ones((2, 24), jnp.int32)
    forms = (
        (jnp.float32, {"segment_ids": None}),
        (jnp.bfloat16, {"segment_ids": ids, "causal": True}),
    )
    for (dtype, own), implementation in itertools.product(forms, ("reference", "xla")):
        rows, heads, filters, light, few, width, outputs = (
            jax.ShapeDtypeStruct(sizes, dtype)
            for sizes in (
                (2, 24, 32), (2, 24, 2, 16), (2, 24, 2, 9), (2, 9), (9, 32), (32, 18), (18,)
            )
        )  # fmt: skip
        if implementation == "xla":
            attend = functools.partial(attention, implementation="xla", **own)
            trace(attend, heads, heads, heads)
        given = own | {"dilation": 2, "implementation": implementation}
        dynamic = functools.partial(dynamic_conv, **given)
        trace(dynamic, heads, filters)
        trace(dynamic, heads, light)
        trace(functools.partial(depthwise_conv, **given), rows, few)
        span = functools.partial(span_dynamic_conv, heads=2, **given)
        trace(span, rows, rows, rows, width, outputs)
        trace(lambda query, *rest, span=span: span(query, None, *rest), rows, rows, width, outputs)
        trace(lambda query, *rest, span=span: span(query, None, None, *rest), rows, width, outputs)
    trace(lambda table: embedding_lookup(table, ids), jax.ShapeDtypeStruct((40, 32), jnp.float32))


def trace_steps() -> None:
    from convbert_jax.ops.convolution import depthwise_conv_step, dynamic_conv_step

    for dtype in (jnp.float32, jnp.bfloat16):
        window, filters, light, rows, few = (
            jax.ShapeDtypeStruct(sizes, dtype)
            for sizes in ((2, 9, 2, 16), (2, 2, 9), (2, 9), (2, 9, 32), (9, 32))
        )
        trace(dynamic_conv_step, window, filters)
        trace(dynamic_conv_step, window, light)
        trace(depthwise_conv_step, rows, few)


def trace_sequences() -> None:
    """Traces training and decoding of generative models: each mixer in one of two models."""
    from flax import nnx

    from convbert_jax.config import ModelSection
    from convbert_jax.config.mixers import MIXERS
    from convbert_jax.config.network import derive_encoder_decoder, derive_language_model
    from convbert_jax.config.sequences import SequenceSection
    from convbert_jax.decoding import search
    from convbert_jax.models.networks import EncoderDecoder, LanguageModel

    ids = jnp.ones((2, 8), jnp.int32)

    def go_on(config):
        made = LanguageModel(config, nnx.Rngs(0))
        begun, first = ids[:, :5], jnp.asarray([0, 3])
        state, read = made.start(begun, first, copies=2, length=9, dtype=jnp.bfloat16)

        def step(tokens, state, place):
            return made.step(tokens, state, place, read, jnp.bfloat16)

        return search(step, state, begun, first, beam=2, length=9, end=1)

    def translate(config):
        made = EncoderDecoder(config, nnx.Rngs(0))
        state, source = made.start(ids, ids, copies=2, length=6, dtype=jnp.bfloat16)

        def step(tokens, state, place):
            return made.step(tokens, state, place, source, jnp.bfloat16)

        found = search(step, state, ids[:, :1], beam=2, length=6, end=1)
        whole = made(ids, ids, ids, ids, dtype=jnp.bfloat16, key=jax.random.key(0))
        return whole, found

    for number, mixer in enumerate(MIXERS):
        model = ModelSection(layers=1, hidden_size=32, embedding_size=32, mixer=mixer, norm="pre")
        sequence = SequenceSection()
        if number % 2:
            alone = derive_language_model(model, sequence, 20)
            jax.eval_shape(functools.partial(go_on, alone))
        else:
            both = derive_encoder_decoder(model, sequence, 20, 20)
            jax.eval_shape(functools.partial(translate, both))


def trace_pretraining() -> None:
    from convbert_jax.config.mixers import MIXERS
    from convbert_jax.recipes import build_task
    from tests.end_to_end.test_devices import SPECIAL, batch_of, small_config

    objectives = (("replaced_token", "none"), ("masked_lm", "none"), ("masked_lm", "next"))
    cases = zip(MIXERS, itertools.cycle(objectives), strict=False)
    for number, (mixer, (name, pairs)) in enumerate(cases):
        config = small_config()
        config = dataclasses.replace(
            config,
            recipe=name,
            objective=dataclasses.replace(config.objective, sentence_pairs=pairs),
            compute_dtype="bfloat16",
            model=dataclasses.replace(config.model, mixer=mixer, layers=1),
        )
        task = build_task(config, SPECIAL, jax.devices()[0])
        params = jax.eval_shape(task.init, jax.random.key(0))
        batch = {field: jnp.asarray(array) for field, array in batch_of(config).items()}
        batch["pair_label"] = jnp.zeros(len(batch["tokens"]), jnp.int32)
        backward = number < len(objectives)
        loss = jax.grad(task.loss, has_aux=True) if backward else task.loss
        jax.eval_shape(lambda p, loss=loss, b=batch: loss(p, b, jax.random.key(0)), params)


def trace_text() -> None:
    from convbert_jax.interfaces import SpecialIds, sentinel_names
    from convbert_jax.objectives.next_tokens import shift
    from convbert_jax.objectives.span_corruption import SpanCounts, corrupt

    extra = {name: 5 + i for i, name in enumerate(sentinel_names(3))}
    special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4, extra=extra)
    rows = jax.ShapeDtypeStruct((2, 48), jnp.int32)
    jax.eval_shape(lambda t, s: shift(t, s, pad=0), rows, rows)
    take_out = functools.partial(corrupt, counts=SpanCounts(48), special=special)
    jax.eval_shape(lambda t, s: take_out(jax.random.key(0), t, s), rows, rows)


def main() -> None:
    packages = [f"convbert_jax.{name}" for name in CHECKED]
    with jaxtyping.install_import_hook(packages, "tests.shapes.check_arrays"):
        trace_ops()
        trace_steps()
        trace_sequences()
        trace_pretraining()
        trace_text()
        from convbert_jax.ops.nn import softmax

        wrong = jnp.ones((4, 5), bool)  # unchecked function
        with refused(jaxtyping.TypeCheckError, "visible"):
            softmax(jnp.zeros((2, 3)), wrong, jnp.float32)
