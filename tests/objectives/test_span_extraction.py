"""Span losses and the best spans against nested loops over the definition."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special, stats

from convbert_jax.models.heads import SpanBeamHead, TokenHead
from convbert_jax.models.layers import initializers
from convbert_jax.objectives import span_extraction

WIDTH, LENGTH, ROWS = 8, 24, 5
HEADS = {
    "span": lambda starts, rngs: TokenHead(WIDTH, 2, starts, rngs),
    "span_beam": lambda starts, rngs: SpanBeamHead(WIDTH, starts, rngs),
}
CONTEXT_AT = np.array([4, 6, 3, 5, 20])
SIZES = np.array([15, 10, 20, 1, 3])  # context tokens


LOSSES = {"span": span_extraction.plain_losses, "span_beam": span_extraction.beam_losses}


@pytest.fixture(scope="module", params=list(HEADS))
def case(request):
    """Return (name of the head, the head with random weights, hidden states, batch)."""
    rng = np.random.default_rng(0)
    starts = initializers("huggingface", 0.5)
    head = HEADS[request.param](starts, nnx.Rngs(0))
    hidden = rng.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
    place = np.arange(LENGTH)
    end_of_row = (CONTEXT_AT + SIZES + 1)[:, None]
    start = np.array([5, 0, 9, 5, 21])
    batch = {
        "tokens": rng.integers(5, 50, (ROWS, LENGTH)),
        "segment_ids": (place < end_of_row).astype(np.int32),
        "type_ids": ((place >= CONTEXT_AT[:, None]) & (place < end_of_row)).astype(np.int32),
        "best": rng.random((ROWS, LENGTH)) < 0.7,
        "start": start,
        "end": np.array([8, 0, 9, 5, 22]),
        "impossible": np.array([0, 1, 0, 0, 0]),
    }
    return request.param, head, hidden, batch


def _model(head, hidden):
    return types.SimpleNamespace(
        head=head, encode=lambda tokens, segments, kinds, dtype, key: jnp.asarray(hidden)
    )


def _predict(name, head, hidden, batch, *, n_best=6, beam=4):
    spans = {
        "span": span_extraction.plain_spans,
        "span_beam": functools.partial(span_extraction.beam_spans, beam=beam),
    }[name]
    run = jax.jit(
        lambda hidden, batch: spans(
            _model(head, hidden), batch, dtype=jnp.float32, answer_length=5, n_best=n_best
        )
    )
    return {key: np.asarray(value) for key, value in run(hidden, batch).items()}


def _gelu(x):
    return x * stats.norm.cdf(x)


def _dense(module, x):
    return x @ np.asarray(module.kernel[...]) + np.asarray(module.bias[...])


def _row_logits(name, head, hidden, row, batch, start=None):
    """Return (start logits, start -> end logits, answerability logit) of one row by definition."""
    x = hidden[row].astype(np.float64)
    context = range(CONTEXT_AT[row], CONTEXT_AT[row] + SIZES[row])
    if name == "span":
        logits = _dense(head.output, x)
        off = np.array([0.0 if i == 0 or i in context else -1e9 for i in range(LENGTH)])
        return logits[:, 0] + off, lambda s: logits[:, 1] + off, None
    legal = {0, *context, context[-1] + 1}
    off = np.array([0.0 if i in legal else -1000.0 for i in range(LENGTH)])
    first = _dense(head.start, x)[:, 0] + off

    def ends(s):
        both = np.concatenate([np.broadcast_to(x[s], x.shape), x], axis=1)
        return _dense(head.end, _gelu(_dense(head.end_hidden, both)))[:, 0] + off

    expected = special.softmax(first) @ x
    inner = _gelu(_dense(head.impossible_hidden, np.concatenate([x[0], expected])))
    return first, ends, _dense(head.impossible, inner)[0]


def test_losses(case):
    name, head, hidden, batch = case
    wanted = []
    for row in range(ROWS):
        start, ends, impossible = _row_logits(name, head, hidden, row, batch)
        s, e = batch["start"][row], batch["end"][row]
        value = -special.log_softmax(start)[s] / 2 - special.log_softmax(ends(s))[e] / 2
        if impossible is not None:
            label = batch["impossible"][row]
            value -= 0.5 * np.log(special.expit(impossible if label else -impossible))
        wanted.append(value)
    run = jax.jit(lambda batch: LOSSES[name](_model(head, hidden), batch, None, dtype=jnp.float32))
    losses, weights = run(batch)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    np.testing.assert_array_equal(weights, np.ones(ROWS))


def _legal_spans(name, head, hidden, row, batch):
    """Return {(start, end): score} of all legal spans; for span_beam only those in the beam."""
    first, ends, impossible = _row_logits(name, head, hidden, row, batch)
    starts = special.log_softmax(first)
    context = set(range(CONTEXT_AT[row], CONTEXT_AT[row] + SIZES[row]))
    beam = LENGTH if name == "span" else 4
    spans = {}
    for s in np.argsort(-starts)[:beam]:
        stops = special.log_softmax(ends(s))
        for e in np.argsort(-stops)[:beam]:
            if s in context and e in context and batch["best"][row, s] and 0 <= e - s < 5:
                spans[int(s), int(e)] = starts[s] + stops[e]
    null = starts[0] + special.log_softmax(ends(0))[0]
    if name == "span":
        return spans, null - max(spans.values(), default=-np.inf)
    return spans, impossible


def test_best_spans(case):
    name, head, hidden, batch = case
    found = _predict(name, head, hidden, batch)
    assert found["starts"].shape == (ROWS, 6)
    some = 0
    for row in range(ROWS):
        spans, odds = _legal_spans(name, head, hidden, row, batch)
        wanted = sorted(spans, key=spans.get, reverse=True)[:6]
        some += len(wanted)
        scores = found["start_scores"][row] + found["end_scores"][row]
        real = scores > span_extraction.NOWHERE / 2
        got = list(zip(found["starts"][row][real], found["ends"][row][real], strict=True))
        assert got == wanted
        np.testing.assert_allclose(scores[real], [spans[pair] for pair in wanted], rtol=1e-4)
        if np.isfinite(odds):
            np.testing.assert_allclose(found["null_odds"][row], odds, rtol=1e-4, atol=1e-5)
        else:
            assert found["null_odds"][row] > 1e6
    assert some > ROWS


def test_rows_shorter_than_the_beam(case):
    """In a short bucket the unused beam slots have invalid spans."""
    name, head, hidden, batch = case
    short = {k: v[3:4, :7] if np.ndim(v) == 2 else v[3:4] for k, v in batch.items()}
    short["best"] = np.ones((1, 7), bool)
    found = _predict(name, head, hidden[3:4, :7], short, n_best=40, beam=20)
    scores = (found["start_scores"] + found["end_scores"])[0]
    assert scores.shape == (40,)
    assert (scores > span_extraction.NOWHERE / 2).sum() == 1  # one context token, one span
    assert (found["starts"][0, 0], found["ends"][0, 0]) == (5, 5)


def test_padding_changes_nothing(case):
    name, head, hidden, batch = case
    wider = {
        key: np.pad(value, ((0, 0), (0, 8))) if np.ndim(value) == 2 else value
        for key, value in batch.items()
    }
    more = np.pad(hidden, ((0, 0), (0, 8), (0, 0)), constant_values=3.0)
    ours = _predict(name, head, hidden, batch)
    theirs = _predict(name, head, more, wider)
    real = ours["start_scores"] + ours["end_scores"] > span_extraction.NOWHERE / 2
    for key in ("starts", "ends", "start_scores", "end_scores"):
        np.testing.assert_allclose(ours[key][real], theirs[key][real], rtol=1e-5, atol=1e-6)
    assert all(ours[key].shape == theirs[key].shape for key in ours)
