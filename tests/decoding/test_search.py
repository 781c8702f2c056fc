"""Decoding against enumeration and plain loops, with a recurrent model of four words."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.decoding import generation, greedy, sample, search
from convbert_jax.decoding.generation import BLOCK, restrict, top_k
from tests.pairwise import pairwise
from tests.refusals import refused

WORDS, END, PAD, LENGTH = 4, 1, 3, 5
START = 2
rng = np.random.default_rng(0)
READ = rng.standard_normal((WORDS, 6)).astype(np.float32)
MIX = rng.standard_normal((6, 6)).astype(np.float32)
TELL = (1.5 * rng.standard_normal((6, WORDS))).astype(np.float32)


def step(tokens, state, place):
    """Recurrent network; its state differs between rows and counts the tokens read."""
    count, state = state[:, :1], state[:, 1:]
    state = jnp.tanh(jnp.take(READ, tokens, axis=0) + state @ MIX + 0.1 * count)
    return state @ TELL, jnp.concatenate([count + 1, state], axis=1)


def starts(rows, seed=0):
    drawn = np.random.default_rng(seed).standard_normal((rows, 6))
    return jnp.pad(jnp.asarray(2 * drawn, jnp.float32), ((0, 0), (1, 0)))


def prompt_of(rows):
    return jnp.full((rows, 1), START)


def state_after(state, prompt, first):
    """Return the state after all tokens of each prompt except the last."""
    for place in range(prompt.shape[1] - 1):
        _, after = step(prompt[:, place], state, place)
        state = jnp.where((place >= first)[:, None], after, state)
    return state


def run_greedy(state, prompt=None, first=None, length=LENGTH):
    prompt = prompt_of(len(state)) if prompt is None else prompt
    first = jnp.zeros(len(state), int) if first is None else first
    state = state_after(state, prompt, first)
    return greedy(step, state, prompt, first, length=length, end=END, pad=PAD)


@functools.partial(jax.jit, static_argnames=("beam", "length", "alpha", "early"))
def run_beam(state, prompt=None, first=None, *, beam, length=LENGTH, alpha=1.0, early=True):
    prompt = prompt_of(len(state)) if prompt is None else prompt
    first = jnp.zeros(len(state), int) if first is None else first
    state = jnp.repeat(state_after(state, prompt, first), beam, axis=0)
    return search(
        step, state, prompt, first, beam=beam, length=length, end=END, pad=PAD, alpha=alpha,
        early=early,
    )  # fmt: skip


@functools.cache
def distribution(row, text):
    """Compute log probabilities of the token after a text, by the model of one row."""
    state = starts(8)[row][None]
    for place, token in enumerate(text):
        logits, state = _step(jnp.asarray([token]), state, place)
    return np.asarray(jax.nn.log_softmax(logits[0]), np.float64)


_step = jax.jit(step)


def all_texts(row):
    """Return all complete texts up to LENGTH with their log probabilities.

    The end token is forced at LENGTH.
    """
    found, open_texts = {}, {(START,): 0.0}
    for place in range(1, LENGTH):
        longer = {}
        for text, score in open_texts.items():
            scores = score + distribution(row, text)
            found[(*text, END)] = scores[END]
            for word in set(range(WORDS)) - {END}:
                longer[(*text, word)] = scores[word]
        open_texts = longer if place < LENGTH - 1 else {}
    return found


def by_loops(row, beam, alpha, early):
    """Run beam search with lists."""
    open_texts, ended = [((START,), 0.0)], []
    for place in range(1, LENGTH):
        worst = sorted((s for _, s in ended), reverse=True)[beam - 1 : beam]
        if worst and (early or open_texts[0][1] / (LENGTH - 1) ** alpha <= worst[0]):
            break
        following = []
        for text, score in open_texts:
            scores = score + distribution(row, text)
            words = [END] if place == LENGTH - 1 else range(WORDS)
            following += [((*text, word), scores[word]) for word in words]
        following = sorted(following, key=lambda pair: -pair[1])[: 2 * beam]
        ended += [(t, s / place**alpha) for t, s in following[:beam] if t[-1] == END]
        open_texts = [(t, s) for t, s in following if t[-1] != END][:beam]
    return sorted(ended, key=lambda pair: -pair[1])[:beam]


def texts_of(found, row):
    """List (text, score) of the hypotheses of a row; check that padding follows each text."""
    pairs = []
    for tokens, length, score in zip(*(np.asarray(x[row]) for x in found), strict=True):
        assert (tokens[length:] == PAD).all()
        if length:
            pairs.append((tuple(int(token) for token in tokens[:length]), float(score)))
        else:
            assert score == -np.inf
    return pairs


def assert_same(ours, wanted):
    assert [text for text, _ in ours] == [text for text, _ in wanted]
    np.testing.assert_allclose([s for _, s in ours], [s for _, s in wanted], atol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_beam_that_holds_everything_finds_the_best_of_all_texts(alpha):
    found = run_beam(starts(8)[:3], beam=40, alpha=alpha)
    for row in range(3):
        ranked = {text: s / (len(text) - 1) ** alpha for text, s in all_texts(row).items()}
        wanted = sorted(ranked.items(), key=lambda pair: -pair[1])
        assert len(wanted) == 40  # 1 + 3 + 9 + 27
        assert_same(texts_of(found, row), wanted)


@pytest.mark.parametrize(
    ("beam", "alpha", "early"), pairwise([1, 2, 3], [0.0, 0.6, 1.5], [True, False])
)
def test_a_small_beam_is_beam_search_by_loops(beam, alpha, early):
    found = run_beam(starts(8), beam=beam, alpha=alpha, early=early)
    for row in range(8):
        assert_same(texts_of(found, row), by_loops(row, beam, alpha, early))


def test_a_beam_of_one_is_greedy():
    found, texts = run_beam(starts(8), beam=1), jax.jit(run_greedy)(starts(8))
    np.testing.assert_array_equal(found.tokens[:, 0], texts.tokens)
    np.testing.assert_array_equal(found.lengths[:, 0], texts.lengths)
    wanted = texts.scores / (texts.lengths - 1)
    np.testing.assert_allclose(found.scores[:, 0], wanted, atol=1e-6)
    assert len(set(np.asarray(texts.lengths).tolist())) > 1  # some end early


def test_what_is_never_written_leaves_the_others_as_probable_as_they_were():
    state, never, room = starts(3), (0, PAD), WORDS**LENGTH
    found = search(
        step, jnp.repeat(state, room, axis=0), prompt_of(3), beam=room, length=LENGTH, end=END,
        pad=PAD, never=never, early=False,
    )  # fmt: skip
    first = greedy(step, state, prompt_of(3), length=LENGTH, end=END, pad=PAD, never=never)
    drawn = sample(
        step, state, prompt_of(3), keys=jax.random.split(jax.random.key(0), 3), length=LENGTH,
        end=END, pad=PAD, never=never, temperature=9.0,
    )  # fmt: skip
    for row in range(3):
        wanted = {
            text: score / (len(text) - 1)
            for text, score in all_texts(row).items()
            if not set(text) & set(never)
        }
        texts = dict(texts_of(found, row))
        assert texts == pytest.approx(wanted, abs=1e-5)
        for one in (first, drawn):
            text = tuple(one.tokens[row, : one.lengths[row]].tolist())
            assert one.scores[row] / (len(text) - 1) == pytest.approx(wanted[text], abs=1e-5)


def test_a_row_does_not_depend_on_its_neighbors_or_on_what_is_before_its_prompt():
    """Prompts have one to three tokens; each row may add five, both in a batch and alone."""
    state = starts(4)
    prompt = jnp.asarray([[0, 0, START], [1, START, 0], [START, END, 0], [START, 3, 2]])
    first = jnp.asarray([2, 1, 0, 0])
    options = {"beam": 3, "alpha": 0.7}
    together = run_beam(state, prompt, first, length=8, **options)
    greedily = jax.jit(lambda *a: run_greedy(*a, length=8))(state, prompt, first)
    keys = jax.random.split(jax.random.key(0), 4)

    def draw_texts(state, prompt, first, keys, length):
        state = state_after(state, prompt, first)
        return sample(step, state, prompt, first, keys=keys, length=length, end=END, pad=PAD)

    drawn = draw_texts(state, prompt, first, keys, 8)
    for row in (0, 3):
        own, head = slice(row, row + 1), prompt[row, int(first[row]) :]
        alone = state[own], head[None]
        length = len(head) + 5
        texts = texts_of(run_beam(*alone, length=length, **options), 0)
        assert_same(texts, texts_of(together, row))
        assert all(text[: len(head)] == tuple(head.tolist()) for text, _ in texts)
        first_alone = draw_texts(*alone, jnp.zeros(1, int), keys[own], length)
        for ours, wanted in (
            (greedily, run_greedy(*alone, length=length)),
            (drawn, first_alone),
        ):
            np.testing.assert_array_equal(ours.tokens[row, :length], wanted.tokens[0])
            assert (ours.tokens[row, length:] == PAD).all()
            np.testing.assert_array_equal(ours.lengths[row], wanted.lengths[0])
            np.testing.assert_allclose(ours.scores[row], wanted.scores[0], atol=1e-5)


def test_the_loop_ends_with_the_last_row():
    calls = []

    def counted(tokens, state, place):
        jax.debug.callback(lambda place: calls.append(int(place)), place)
        return step(tokens, state, place)

    def until(give_end):
        calls.clear()

        def sure(tokens, state, place):
            logits, state = counted(tokens, state, place)
            of_end = jnp.where(place >= give_end, 50.0, -50.0)
            return logits.at[:, END].set(of_end), state

        greedy(sure, starts(3), prompt_of(3), length=30, end=END)
        jax.effects_barrier()
        return len(calls)

    assert until(0) == 1
    assert until(7) == 8
    assert until(99) == 29


def test_the_last_token_is_the_end():
    def never(tokens, state, place):
        logits, state = step(tokens, state, place)
        return logits.at[:, END].add(-20.0), state

    texts = greedy(never, starts(3), prompt_of(3), length=6, end=END)
    assert (texts.tokens[:, -1] == END).all()
    assert (texts.lengths == 6).all()
    assert (texts.scores < -15).all()  # includes the log probability of the forced end


# --- Sampling ---


def draw(seed, rows, temperature=1.0, **options):
    keys = jax.random.split(jax.random.key(seed), rows)
    state = jnp.repeat(starts(1), rows, axis=0)
    return sample(
        step, state, prompt_of(rows), keys=keys, length=LENGTH, end=END, pad=PAD,
        temperature=temperature, **options,
    )  # fmt: skip


def test_texts_are_drawn_as_probable_as_they_are():
    rows = 20_000
    texts = jax.jit(lambda: draw(0, rows))()
    counts = {}
    for tokens, length in zip(np.asarray(texts.tokens), np.asarray(texts.lengths), strict=True):
        text = tuple(int(token) for token in tokens[:length])
        counts[text] = counts.get(text, 0) + 1
    state = starts(1)

    def probability(text):
        total, kept = 0.0, state
        for place, (token, following) in enumerate(itertools.pairwise(text)):
            logits, kept = _step(jnp.asarray([token]), kept, place)
            if place < LENGTH - 2:
                total += float(jax.nn.log_softmax(logits[0])[following])
        return np.exp(total)

    for text, number in sorted(counts.items(), key=lambda pair: -pair[1])[:8]:
        expected = rows * probability(text)
        assert abs(number - expected) < 5 * expected**0.5, text


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_without_a_choice_it_is_greedy(options):
    drawn, wanted = draw(0, 5, **options), run_greedy(jnp.repeat(starts(1), 5, axis=0))
    np.testing.assert_array_equal(drawn.tokens, wanted.tokens)
    np.testing.assert_allclose(drawn.scores, wanted.scores, atol=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.6), (4, 0.9), (50, 0.01)])
def test_what_is_cut_is_what_a_plain_count_cuts(top_k, top_p):
    logits = np.random.default_rng(1).standard_normal((20, 9)).astype(np.float32) * 2
    out = np.asarray(restrict(jnp.asarray(logits), top_k, top_p))
    for row, ours in zip(logits, out, strict=True):
        order = np.argsort(-row)[: top_k or None]
        shares = np.exp(row[order]) / np.exp(row[order]).sum()
        fewest = 1 + int((np.cumsum(shares) < top_p - 1e-6).sum())
        kept = set(order[:fewest]) if top_p < 1 else set(order)
        assert set(np.flatnonzero(np.isfinite(ours))) == kept
        np.testing.assert_array_equal(ours[list(kept)], row[list(kept)])


# --- Errors ---


@pytest.mark.parametrize(
    ("call", "mentions"),
    [
        (lambda: run_beam(starts(1), beam=0), ["search", "beam=0", "alpha=1.0"]),
        (lambda: run_beam(starts(1), beam=2, alpha=-1.0), ["search", "beam=2", "alpha=-1.0"]),
        (lambda: run_greedy(starts(1), length=1), ["[1, 1]", 1]),
        (lambda: draw(0, 1, temperature=0.0), ["sample", "temperature=0.0", "top_k=0"]),
        (lambda: draw(0, 1, top_p=0.0), ["sample", "top_p=0.0"]),
        (lambda: draw(0, 1, top_p=1.1), ["sample", "top_p=1.1"]),
        (lambda: draw(0, 1, top_k=-1), ["sample", "top_k=-1"]),
    ],
)
def test_errors_name_arguments_and_values(call, mentions):
    with refused(ValueError, *mentions):
        call()


@pytest.mark.parametrize("how", ["greedy", "sample", "beam"])
def test_a_row_with_a_limit_of_its_own_is_as_in_a_batch_of_that_length(how):
    """The result does not depend on the limits of other rows."""
    limits, state = np.asarray([3, 5, 3, 2]), starts(4)
    keys = jax.random.split(jax.random.key(0), 4)

    def write(length, limits=None):
        options = {"length": length, "end": END, "pad": PAD, "limits": limits}
        prompt = prompt_of(4)
        if how == "beam":
            beams = jnp.repeat(state, 2, axis=0)
            return search(step, beams, prompt, beam=2, early=False, **options)
        if how == "sample":
            return sample(step, state, prompt, keys=keys, **options)
        return greedy(step, state, prompt, **options)

    together = write(5, jnp.asarray(limits))
    for limit in (2, 3, 5):
        rows = limits == limit
        alone = write(limit)
        np.testing.assert_array_equal(together.tokens[rows][..., :limit], alone.tokens[rows])
        np.testing.assert_array_equal(together.lengths[rows], alone.lengths[rows])
        np.testing.assert_allclose(together.scores[rows], alone.scores[rows], atol=1e-5)


# --- Top-k tokens of a position ---


@pytest.mark.parametrize("words", [11, 3_000])
def test_the_best_tokens_are_those_with_the_highest_probability(words):
    """Three rows may continue; the last one must end."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((4, words)), jnp.float32)
    last, never = jnp.asarray([False, False, False, True]), (0, 5)

    every = generation.only_end(generation.log_probabilities(logits, never), END, last)
    wanted, tokens = jax.lax.top_k(every, 6)
    found, chosen = generation.best_next(logits, 6, END, last, never)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    possible = np.asarray(wanted) > -np.inf  # ties at -inf may resolve to any token
    np.testing.assert_array_equal(np.asarray(chosen)[possible], np.asarray(tokens)[possible])


def test_rows_are_moved_to_the_front():
    tokens = jnp.asarray([[7, 7, 2, 3], [2, 3, 4, 5], [7, 2, 3, 4]])
    first, wanted = jnp.asarray([2, 0, 1]), [[2, 3, 9, 9], [2, 3, 4, 5], [2, 3, 4, 9]]
    np.testing.assert_array_equal(generation.to_front(tokens, first, 9), wanted)
    beams = jnp.stack([tokens, tokens + 10], axis=1)
    moved = generation.to_front(beams, first, 9)
    np.testing.assert_array_equal(moved[:, 0], wanted)
    np.testing.assert_array_equal(moved[0, 1], [12, 13, 9, 9])


@pytest.mark.parametrize(
    ("entries", "count"),
    [(1, 1), (BLOCK + 1, 1), (2 * BLOCK, 1), (2 * BLOCK + 1, 1), (16 * BLOCK + 1, 8), (700, 5)],
)
def test_top_k_is_that_of_a_whole_sort(entries, count):
    """Equal entries keep their order; long rows are not fully sorted."""
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 20, (30, entries)).astype(np.float32)
    scores[::3, rng.random(entries) < 0.7] = -np.inf
    for ours, theirs in zip(top_k(scores, count), jax.lax.top_k(scores, count), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    program = jax.make_jaxpr(lambda x: top_k(x, count))(scores)
    ordered = {e.invars[0].aval.shape[-1] for e in program.eqns if e.primitive.name == "top_k"}
    assert (entries in ordered) == (-(-entries // BLOCK) <= 2 * count)
