"""The `paper` recipe of fine-tuning against the same formulas in PyTorch, with the same weights.

Three steps with summed loss, clipping at global norm 1, Adam without bias correction, decoupled
weight decay except for biases and layer norms, layer-wise rates, and warm-up multiplied by a
decay from the first step. Dropout is off because the random generators differ.
"""

import dataclasses
import re

import jax
import numpy as np
import optax
import pytest

from configs import glue, squad
from convbert_jax.config import OutputsSection, from_config_dict
from convbert_jax.finetuning import classification, fitting, question_answering
from convbert_jax.finetuning.fitting import Programs, widen_head
from convbert_jax.finetuning.run_files import Setting
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.objectives import classification as labelled_objective
from convbert_jax.training import partitioning
from tests.parity.pytorch_weights import read
from tests.parity.test_huggingface import build_theirs

pytestmark = pytest.mark.parity
torch = None  # set by imported_late

LAYERS, WIDTH, LENGTH, ROWS, STEPS = 3, 32, 20, 6, 20
SIZES = {
    "layers": LAYERS, "hidden_size": WIDTH, "embedding_size": 16, "heads": 4, "ffn_size": 48,
    "positions": 64,
}  # fmt: skip
RATE = 3e-3  # ten times the official rate, to make mistakes visible


@pytest.fixture(scope="module", autouse=True)
def imported_late():
    """Import PyTorch only when the tests run."""
    global torch
    torch = pytest.importorskip("torch")


def paper(get_config, variant):
    """Return the paper variant of a config with the sizes of this test and without dropout."""
    config = from_config_dict(get_config(variant))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, **SIZES, dropout=0.0, attention_dropout=0.0, mask_convolution=False
        ),
        tokenizer=dataclasses.replace(config.tokenizer, vocab_size=500),
        finetune=dataclasses.replace(config.finetune, length=LENGTH, dropout=0.0),
    )


def make_batches(seed=0):
    rng = np.random.default_rng(seed)
    batches = []
    for _ in range(3):
        lengths = rng.integers(12, LENGTH + 1, ROWS)
        places = np.arange(LENGTH)
        real = places < lengths[:, None]
        batches.append(
            {
                "tokens": np.where(real, rng.integers(5, 500, (ROWS, LENGTH)), 0).astype(np.int32),
                "type_ids": (real & (places >= 6)).astype(np.int32),
                "segment_ids": real.astype(np.int32),
                "weight": np.array([1, 1, 1, 1, 1, 0], np.float32),  # the last row is padding
                "label": rng.integers(0, 3, ROWS).astype(np.int32),
                "value": np.zeros(ROWS, np.float32),
                "start": np.array([6, 0, 8, 9, 7, 0], np.int32),
                "end": np.array([9, 0, 8, 11, 8, 0], np.int32),
                "impossible": np.array([0, 1, 0, 0, 0, 0], np.int32),
            }
        )
    return batches


# --- Both tasks in JAX and PyTorch; heads are {path: array} in our layout ---


def classification_task():
    outputs = OutputsSection(head="first_token", labels=("a", "b", "c"))
    width = classification.compiled_width(3)
    constants = classification.constants_of(outputs, width)
    return outputs, width, labelled_objective.text_losses, constants


def span_task():
    outputs = OutputsSection(kind="span", head="span_beam", labels=question_answering.LABELS)
    return outputs, 2, question_answering._LOSSES["span_beam"], {}


def dense(head, name, x):
    return x @ head[f"{name}/kernel"] + head[f"{name}/bias"]


def classification_loss(hidden, head, batch):
    logits = dense(head, "output", hidden[:, 0])
    return torch.nn.functional.cross_entropy(logits, batch["label"].long(), reduction="none")


def span_loss(hidden, head, batch):
    """Compute the loss of `finetune/qa/qa_tasks.py`: joint start and end, and answerability."""
    rows = torch.arange(len(hidden))
    gelu = torch.nn.functional.gelu
    allowed = batch["segment_ids"] * batch["type_ids"]
    allowed[:, 0] = 1
    off = 1000.0 * (allowed.float() - 1)
    start = dense(head, "start", hidden)[..., 0] + off
    given = hidden[rows, batch["start"].long()][:, None].expand_as(hidden)
    inner = gelu(dense(head, "end_hidden", torch.cat([given, hidden], -1)))
    end = dense(head, "end", inner)[..., 0] + off
    expected = (torch.softmax(start, -1)[..., None] * hidden).sum(1)
    both = torch.cat([hidden[:, 0], expected], -1)
    impossible = dense(head, "impossible", gelu(dense(head, "impossible_hidden", both)))[:, 0]
    cross_entropy = torch.nn.functional.cross_entropy
    places = cross_entropy(start, batch["start"].long(), reduction="none")
    places = places + cross_entropy(end, batch["end"].long(), reduction="none")
    known = torch.nn.functional.binary_cross_entropy_with_logits(
        impossible, batch["impossible"].float(), reduction="none"
    )
    return places / 2 + 0.5 * known


# The official decay of 0.01 changes parameters by less than the tolerance; one case uses more.
CASES = {
    "classification": (
        glue.get_config, "mrpc,paper", classification_task, classification_loss, 5.0
    ),
    "squad": (squad.get_config, "v2,paper", span_task, span_loss, 0.01),
}  # fmt: skip


def multiplier(name):
    """Rate multiplier of `model/optimization.py` for three layers: 0.8^(n + 2 - depth)."""
    if name.startswith("head."):
        return 1.0
    layer = re.search(r"layer\.(\d+)\.", name)
    return 0.8 ** (5 - (int(layer[1]) + 1 if layer else 0))


def train_theirs(encoder, head, loss_of, batches, decay):
    """Return (losses, clipped gradients of step 1, gradient norms, final named parameters)."""
    named = dict(encoder.named_parameters()) | {f"head.{k}": p for k, p in head.items()}
    m = {name: torch.zeros_like(p) for name, p in named.items()}
    v = {name: torch.zeros_like(p) for name, p in named.items()}
    losses, first, norms = [], None, []
    for step, batch in enumerate(batches):
        batch = {key: torch.tensor(value) for key, value in batch.items()}
        hidden = encoder(
            input_ids=batch["tokens"].long(),
            attention_mask=batch["segment_ids"],
            token_type_ids=batch["type_ids"].long(),
        ).last_hidden_state
        loss = (loss_of(hidden, head, batch) * batch["weight"]).sum()
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        gradients = {
            name: torch.zeros_like(p) if g is None else g
            for (name, p), g in zip(named.items(), gradients, strict=True)
        }
        norm = torch.sqrt(sum((g**2).sum() for g in gradients.values()))
        gradients = {name: g * min(1.0, 1.0 / norm.item()) for name, g in gradients.items()}
        first = first or {name: g.numpy() for name, g in gradients.items()}
        norms.append(norm.item())
        losses.append(loss.item())
        rate = RATE * (1 - step / STEPS) * min(1.0, step / 2)  # warm-up over a tenth of the steps
        with torch.no_grad():
            for name, p in named.items():
                m[name] = 0.9 * m[name] + 0.1 * gradients[name]
                v[name] = 0.999 * v[name] + 0.001 * gradients[name] ** 2
                update = m[name] / (torch.sqrt(v[name]) + 1e-6)
                if not re.search("LayerNorm|bias", name):
                    update = update + decay * p
                p -= rate * multiplier(name) * update
    return losses, first, norms, {name: p.detach().numpy() for name, p in named.items()}


def as_ours(named):
    """Convert their arrays to our parameters."""
    inside = {name: array for name, array in named.items() if not name.startswith("head.")}
    head = {}
    for name, array in named.items():
        if name.startswith("head."):
            module, leaf = name.removeprefix("head.").split("/")
            head.setdefault(module, {})[leaf] = array
    return {**jax.tree.map(np.asarray, read(LAYERS, inside)), "head": head}


@pytest.mark.parametrize("case", CASES)
def test_three_steps(case):
    get_config, variant, make_task, loss_of, decay = CASES[case]
    config = paper(get_config, variant)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, weight_decay=decay)
    )
    encoder = build_theirs("small", config.model)
    encoder.embeddings.word_embeddings.padding_idx = None  # the official code trains [PAD] too
    outputs, width, losses, constants = make_task()
    task = FinetuneTask(
        name=case, outputs=outputs, width=width, losses=losses, predict=None, constants=constants,
        epochs=1.0, train=None, evaluation={}, evaluators={}, write=None,
    )  # fmt: skip
    mesh = partitioning.make_mesh(config.mesh, jax.devices()[:1])
    programs = Programs(config, np.dtype(np.float32), mesh)
    rng = np.random.default_rng(1)
    shapes = jax.tree.map(
        np.shape, programs.new_head(task, 0), is_leaf=lambda x: hasattr(x, "shape")
    )
    head = {
        f"{module}/{leaf}": torch.tensor(
            0.1 * rng.standard_normal(shape), dtype=torch.float32, requires_grad=True
        )
        for module, leaves in shapes.items()
        for leaf, shape in leaves.items()
    }
    starts = {name: p.detach().numpy().copy() for name, p in encoder.named_parameters()}
    starts |= {f"head.{name}": p.detach().numpy().copy() for name, p in head.items()}
    params = widen_head(as_ours(starts), len(outputs.labels), width)

    batches = make_batches()
    wanted_losses, wanted_gradients, norms, wanted = train_theirs(
        encoder, head, loss_of, batches, decay
    )
    assert min(norms) > 1  # clipping is active in all three steps

    program = programs.of(task, None)
    state = program.start(params)
    rates = fitting.learning_rates(config, Setting(RATE, 1.0), STEPS)
    for number, batch in enumerate(batches):
        given = np.uint32(0), rates[number], constants
        state, _, vitals = program.train_step(state, batch, *given)
        assert vitals.loss == pytest.approx(wanted_losses[number], rel=1e-5)
        if number == 0:  # the first moment is a tenth of the first clipped gradient
            gradients = jax.tree.map(
                lambda m: 10 * np.asarray(m), optax.tree_utils.tree_get(state.opt_state, "mu")
            )
    compare(gradients, widen_head(as_ours(wanted_gradients), len(outputs.labels), width))
    final = jax.device_get(state.params)
    compare(final, widen_head(as_ours(wanted), len(outputs.labels), width))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), final, dict(params))
    assert max(jax.tree.leaves(moved)) > 1e-3


def compare(ours, theirs):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), ours, theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


def test_rates_are_those_of_the_table():
    """`model/optimization.py`, 12 layers: head 1, layer 11 0.64, 0 0.055, embeddings 0.044."""
    from convbert_jax.training.optimizer import layer_multipliers

    one = np.zeros((12, 2, 2))
    params = {
        "embeddings": {"word": {"embedding": np.zeros((4, 2))}},
        "encoder": {
            "embeddings_project": {"kernel": np.zeros((2, 2))},
            "stages": {"0": {"mixer": {"query": {"kernel": one}}}},
        },
        "head": {"output": {"kernel": np.zeros((2, 2))}},
    }
    rates = layer_multipliers(params, 0.8)
    layers = np.ravel(rates["encoder"]["stages"]["0"]["mixer"]["query"]["kernel"])
    np.testing.assert_allclose(layers, [0.8 ** (13 - i) for i in range(12)], rtol=1e-6)
    np.testing.assert_allclose(layers[[0, 11]], [0.055, 0.64], rtol=1e-2)
    assert float(rates["head"]["output"]["kernel"]) == 1
    for leaf in (rates["embeddings"], rates["encoder"]["embeddings_project"]):
        np.testing.assert_allclose(jax.tree.leaves(leaf)[0], 0.8**14, rtol=1e-6)
