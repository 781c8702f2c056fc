"""Pre-training losses and metrics against sums by hand, in float64, on rows with padding.

The model returns fixed logits and records its inputs. Labels, weights and replaced tokens
are read from them, independently of the tested code.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.config import Config
from convbert_jax.interfaces import SpecialIds
from convbert_jax.objectives import masked_lm, metrics, replaced_token
from tests.batches import metrics_of

CLS, SEP, MASK, VOCABULARY, LENGTH, SLOTS = 2, 3, 4, 20, 12, 8
SPECIAL = SpecialIds(pad=0, unknown=1, cls=CLS, sep=SEP, mask=MASK)
REAL = (12, 7, 3, 0)  # tokens per row; the first row has two documents
CHOSEN = (3, 2, 1, 0)  # masked tokens: 0.3 of REAL, at most 3
SEGMENTS = np.array([[1] * 5 + [2] * 7] + [[1] * real + [0] * (12 - real) for real in REAL[1:]])


def make_batch():
    tokens = np.random.default_rng(0).integers(5, 8, (4, LENGTH))  # few words: many correct samples
    for row, real in enumerate(REAL):
        tokens[row, real:] = 0
        if real:
            tokens[row, 0], tokens[row, real - 1] = CLS, SEP
    arrays = {"tokens": tokens, "segment_ids": SEGMENTS, "type_ids": np.zeros_like(tokens)}
    arrays["pair_label"] = np.asarray([0, 0, 1, -1])  # the last row has none
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def make_config(**objective):
    config = Config()
    fixed = {"mask_fraction": 0.3, "mask_token_fraction": 1.0}
    return dataclasses.replace(
        config,
        objective=dataclasses.replace(config.objective, **fixed, **objective),
        tokenizer=dataclasses.replace(config.tokenizer, vocab_size=VOCABULARY),
        data=dataclasses.replace(config.data, length=LENGTH),
    )


class Fixed:
    """Model with fixed logits that records its inputs."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.mlm = rng.normal(size=(4, SLOTS, VOCABULARY)).astype(np.float32)
        self.mlm[..., 5:8] += 3.0
        self.detection = np.round(rng.normal(size=(4, LENGTH)), 1).astype(np.float32)  # some ties
        self.detection[0, :2] = 90.0, -90.0  # probabilities round to 1 and 0 in float32
        self.keys = []

    def generate(self, tokens, segment_ids, type_ids, positions, *, dtype, key):
        self.masked, self.positions = np.asarray(tokens), np.asarray(positions)
        self.keys.append(key)
        return jnp.asarray(self.mlm)

    def encode(self, tokens, segment_ids, type_ids, *, dtype, key):
        self.masked = np.asarray(tokens)
        self.keys.append(key)

    def predict(self, hidden, positions):
        self.positions = np.asarray(positions)
        return jnp.asarray(self.mlm)

    def judge(self, hidden):
        self.pairs = np.asarray([[2.0, 0.5], [0.0, 1.0], [1.0, -1.0], [3.0, 3.0]], np.float32)
        return jnp.asarray(self.pairs)

    def discriminate(self, tokens, segment_ids, type_ids, *, dtype, key):
        self.corrupted = np.asarray(tokens)
        self.keys.append(key)
        return jnp.asarray(self.detection)


def run(objective, *, train=True, **changes):
    """Return (loss, {name: number}, the model, tokens)."""
    model, batch, config = Fixed(), make_batch(), make_config(**changes)
    value, sums = objective.loss(
        model,
        batch,
        jax.random.key(3),
        train=train,
        dtype=jnp.float32,
        config=config,
        special=SPECIAL,
    )
    sums = jax.tree.map(np.asarray, sums)
    heldout = metrics.heldout(sums, objective.terms(config))
    numbers = metrics.summarize(sums) if train else metrics_of(heldout, [sums])
    assert all((key is not None) == train for key in model.keys), "dropout outside of training"
    return float(value), numbers, model, np.asarray(batch["tokens"])


def predictions(model, tokens):
    """List (row, slot, position) of masked tokens. Unused slots have position 0, which is [CLS]."""
    used = [(row, slot, at) for (row, slot), at in np.ndenumerate(model.positions) if at]
    assert [sum(row == r for row, _, _ in used) for r in range(4)] == list(CHOSEN)
    hidden = {(row, at) for row, _, at in used}
    for (row, at), token in np.ndenumerate(tokens):
        assert model.masked[row, at] == (MASK if (row, at) in hidden else token)
    return used


def masked_lm_by_hand(model, tokens):
    """Return (mean loss, accuracy)."""
    losses, correct = [], []
    for row, slot, at in predictions(model, tokens):
        logits = [float(x) for x in model.mlm[row, slot]]
        powers = [math.exp(x) for x in logits]
        losses.append(-math.log(powers[tokens[row, at]] / sum(powers)))
        correct.append(logits[tokens[row, at]] == max(logits))
    return sum(losses) / len(losses), sum(correct) / len(correct)


@pytest.mark.parametrize(("with_replacement", "train"), [(False, True), (True, False)])
def test_masked_lm(with_replacement, train):
    loss, numbers, model, tokens = run(
        masked_lm, train=train, sample_with_replacement=with_replacement
    )
    wanted, accuracy = masked_lm_by_hand(model, tokens)
    assert loss == pytest.approx(wanted, rel=2e-6)
    assert numbers == pytest.approx(
        {"mlm_loss": wanted, "mlm_accuracy": accuracy, "loss": wanted}, rel=2e-6
    )


def test_pairs_of_sentences_are_added_to_masked_words():
    """The mean is over the three rows with a label, of which one is right."""
    loss, numbers, model, tokens = run(masked_lm, sentence_pairs="next")
    wanted, _ = masked_lm_by_hand(model, tokens)
    pairs = sum(
        math.log(math.exp(row[0]) + math.exp(row[1])) - row[label]
        for row, label in zip(model.pairs.tolist(), [0, 0, 1], strict=False)
    )
    assert loss == pytest.approx(wanted + pairs / 3, rel=1e-5)
    assert numbers["pair_loss"] == pytest.approx(pairs / 3, rel=1e-5)
    assert numbers["pair_accuracy"] == pytest.approx(1 / 3)


def test_z_loss_is_added_in_training_alone():
    plain, _, _, _ = run(masked_lm)
    loss, _, model, tokens = run(masked_lm, z_loss=0.01)
    used = predictions(model, tokens)
    squares = [np.log(np.exp(model.mlm[row, slot]).sum()) ** 2 for row, slot, _ in used]
    assert loss == pytest.approx(plain + 0.01 * np.mean(squares), rel=1e-5)
    held_out = [run(masked_lm, train=False, z_loss=z)[0] for z in (0.0, 0.01)]
    assert held_out[0] == held_out[1]


def test_constant_logits_are_as_accurate_as_guessing(monkeypatch):
    """A uniform generator and a collapsed model give constant logits."""
    constant = jnp.zeros((4, SLOTS, VOCABULARY))
    monkeypatch.setattr(Fixed, "generate", lambda self, *inputs, **settings: constant)
    _, numbers, _, _ = run(replaced_token, train=False)
    assert numbers["mlm_accuracy"] == pytest.approx(1 / VOCABULARY)


def area(pairs):
    """Compute the area under the ROC curve of (score, is positive), pair by pair."""
    positive = [score for score, yes in pairs if yes]
    negative = [score for score, yes in pairs if not yes]
    above = sum((p > n) + (p == n) / 2 for p in positive for n in negative)
    return above / (len(positive) * len(negative))


@pytest.mark.parametrize(("weights", "train"), [((1.0, 50.0), True), ((0.5, 3.0), False)])
def test_replaced_token(weights, train):
    loss, numbers, model, tokens = run(
        replaced_token,
        train=train,
        generator_weight=weights[0],
        discriminator_weight=weights[1],
        release_metrics=True,
    )
    mlm, accuracy = masked_lm_by_hand(model, tokens)
    used = predictions(model, tokens)
    hidden = {(row, at) for row, _, at in used}
    places = list(np.ndindex(4, LENGTH))
    fake = {place: bool(model.corrupted[place] != tokens[place]) for place in places}
    assert {place for place in places if fake[place]} <= hidden
    assert 2 <= sum(fake.values()) < len(used), "some samples must equal the original tokens"

    real = [(row, at) for row, at in places if at < REAL[row]]
    scores = {place: float(model.detection[place]) for place in places}
    losses = {
        place: -math.log(1 / (1 + math.exp(-scores[place] if fake[place] else scores[place])))
        for place in real
    }
    detection = sum(losses.values()) / len(real)
    of_rows = [[losses[row, at] for at in range(REAL[row])] for row in range(3)]
    flagged = [place for place in real if scores[place] > 0]
    found = sum(fake[place] for place in flagged)
    padding = [(-math.inf, False) for row, at in places if at >= REAL[row]]
    total = weights[0] * mlm + weights[1] * detection
    assert loss == pytest.approx(total, rel=2e-6)
    wanted = {
        "mlm_loss": mlm,
        "mlm_accuracy": accuracy,
        "sampled_accuracy": 1 - sum(fake.values()) / len(used),
        "replaced_rate": sum(fake.values()) / len(real),
        "discriminator_loss": detection,
        "discriminator_accuracy": sum((scores[p] > 0) == fake[p] for p in real) / len(real),
        "discriminator_precision": found / len(flagged),
        "discriminator_recall": found / sum(fake.values()),
        "discriminator_auc": area([(scores[place], fake[place]) for place in real]),
        "release_auc": area([(scores[place], fake[place]) for place in real] + padding),
        "release_discriminator_loss": sum(sum(row) / len(row) for row in of_rows) / 3,
        "loss": total,
    }
    assert numbers == pytest.approx(wanted, rel=2e-6)


def test_the_generator_learns_from_its_own_loss_alone():
    """The discriminator reads the generator's samples; no gradient flows through them."""

    class Model:
        def __init__(self, mlm, detection):
            self.mlm, self.detection = mlm, detection

        def generate(self, *arguments, dtype, key):
            return self.mlm

        def discriminate(self, tokens, *arguments, dtype, key):
            return self.detection * tokens  # depends on the samples

    def value(mlm, detection, weight):
        arguments = (Model(mlm, detection), make_batch(), jax.random.key(3))
        config = make_config(generator_weight=weight)
        settings = {"train": True, "dtype": jnp.float32, "config": config, "special": SPECIAL}
        return replaced_token.loss(*arguments, **settings)[0]

    fixed = Fixed()
    run = jax.jit(jax.grad(value, argnums=(0, 1)), static_argnums=2)
    for weight in (0.0, 1.0):
        of_generator, of_discriminator = run(fixed.mlm, fixed.detection, weight)
        assert np.any(of_discriminator)
        assert np.any(of_generator) == (weight > 0)
