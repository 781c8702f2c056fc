"""One step of every recipe and mixer on meshes of eight devices against one device.

Loss and all gradients in float32 agree to 1e-5 of the largest value of each array.
"""

import dataclasses
import functools
import itertools
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from convbert_jax.analysis.hlo import find_collectives
from convbert_jax.config import Config, MeshSection, from_config_dict, to_dict
from convbert_jax.config.mixers import MIXERS
from convbert_jax.finetuning import fitting as finetuning
from convbert_jax.finetuning.task import FinetuneTask
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import split
from convbert_jax.interop.sources import Source
from convbert_jax.objectives import classification, span_extraction
from convbert_jax.recipes import planning, teaching
from convbert_jax.training import optimizer, partitioning
from convbert_jax.training.partitioning import Params
from convbert_jax.training.train_step import Program, make_program
from tests.agreement import assert_agree
from tests.models.mean_mixer import NAME

ROWS, LENGTH, VOCABULARY = 16, 32, 128
SMALL = {
    "model.layers": 1,
    "model.hidden_size": 64,
    "model.embedding_size": 32,
    "model.heads": 16,
    "model.ffn_size": 128,
    "model.positions": LENGTH,
    "generator.size": 0.5,
    "tokenizer.vocab_size": VOCABULARY,
    "data.length": LENGTH,
    "parallel.max_length": LENGTH,
    "parallel.batch_tokens": ROWS * LENGTH,
    "train.batch_size": ROWS,
}
CAUSAL = {"model.mixer": "dynamic", "model.embedding_size": 64}
PAIRS = {"data.layout": "pairs", "objective.sentence_pairs": "next"}
TAUGHT = {
    "distillation.teacher": "a teacher of two layers",
    "distillation.teacher_hidden_size": 32,
    "distillation.teacher_embedding_size": 32,
    "distillation.hidden_weight": 1.0,
    "distillation.attention_weight": 1.0,
    "distillation.embeddings_weight": 1.0,
}
STAGES = (  # three kinds of layers, one with a custom mixer
    {"layers": 1, "mixer": NAME, "mixer_fields": ["gain=0.5"]},
    {"layers": 1, "kernel_size": 3},
    {"layers": 1, "mixer": "attention", "kernel_size": 5},
)
LOSSES = {
    "sequence": classification.text_losses,
    "first_and_mean": classification.text_losses,
    "token": classification.tag_losses,
    "span": span_extraction.plain_losses,
    "span_beam": span_extraction.beam_losses,
}
# name -> recipe and fields. Span corruption and translation follow below, with every mixer.
# summarization and text_to_text have the same program as translation.
STEPS = {
    "replaced_token": ("replaced_token", {}),
    "replaced_token, masked words first": ("replaced_token", {"objective.masked_lm_steps": 2}),
    "replaced_token, accumulated": ("replaced_token", {"train.accumulation": 2}),
    "replaced_token, stages": ("replaced_token", {"model.layers": 3, "model.stages": STAGES}),
    "masked_lm": ("masked_lm", {}),
    "masked_lm, taught": ("masked_lm", TAUGHT),
    "masked_lm, pairs": ("masked_lm", PAIRS),
    "causal_lm": ("causal_lm", CAUSAL),
    **{f"finetune, {head}": ("finetune", {}) for head in LOSSES},
}
# XLA:CPU is wrong if rows, parameters and channels are all sharded, unless
# `partitioning.constrain_activations` keeps activations unsharded along channels. Every mixer is
# therefore tested on DIVIDED, in encoder and decoder.
DIVIDED, ALL = ("data", "fsdp", "tensor"), ("fsdp", "tensor", "sequence")
OTHERS = [("data", "tensor", "sequence"), ("data", "fsdp", "sequence")]
OF_MIXERS = {
    f"{recipe}, {mixer}": (recipe, CAUSAL | {"model.mixer": mixer})
    for mixer, recipe in zip(
        MIXERS, itertools.cycle(["span_corruption", "translation"]), strict=False
    )
}
# Every recipe and mixer runs on meshes that together cover each axis with two devices. Fine-tuning
# heads differ only in their losses and get one mesh each. Then eight devices along one axis.
CASES = [
    *((name, axes) for name in OF_MIXERS for axes in (DIVIDED, ALL)),
    *((name, ALL) for name in STEPS if "finetune" not in name),
    *((name, OTHERS[i % 2]) for i, name in enumerate(STEPS)),
    *(("masked_lm", (axis,)) for axis in partitioning.AXES),
]


def mesh_of(axes: tuple[str, ...]) -> MeshSection:
    size = 2 if len(axes) == 3 else 8
    return MeshSection(**{"data": 1} | dict.fromkeys(axes, size))


class Case(NamedTuple):
    """Program on a mesh, and the inputs of its step."""

    program: Program
    batch: dict[str, np.ndarray]
    given: tuple


def make_config(recipe: str, **fields) -> Config:
    return from_config_dict(to_dict(replace(Config(recipe=recipe), SMALL | fields)))


def draw(path, leaf) -> np.ndarray:
    """Draw a parameter as large as after some training, so that gradients are not tiny."""
    rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
    center = 1.0 if path[-1].key == "scale" else 0.0
    return (center + 0.2 * rng.standard_normal(leaf.shape)).astype(np.float32)


def rows() -> dict[str, np.ndarray]:
    """Make rows of two documents; every other row ends in padding."""
    tokens = np.random.default_rng(0).integers(5, VOCABULARY - 8, (ROWS, LENGTH)).astype(np.int32)
    segments = np.where(np.arange(LENGTH) < 18, 1, 2).astype(np.int32) * np.ones_like(tokens)
    segments[::2, 27:] = 0
    tokens[segments == 0] = 0
    tokens[:, [0, 18]], tokens[:, 17] = 2, 3
    return {"tokens": tokens, "segment_ids": segments, "type_ids": np.zeros_like(tokens)}


def make_teacher(config: Config) -> teaching.Teacher:
    fields = {"model.layers": 2, "model.hidden_size": 32}
    network = make_config(config.recipe, **fields)
    weights = jax.eval_shape(
        lambda: planning.make_task(network, jax.devices()[0]).init(jax.random.key(0))
    )
    networks = split(network, jax.tree_util.tree_map_with_path(draw, weights))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(teaching.sources, "read_source", lambda _: Source("run", networks))
        patch.setattr(teaching, "load_tokenizer", lambda *_: None)
        patch.setattr(teaching.importing, "check_vocabulary", lambda *_: None)
        return teaching.open_teacher(config)


def make_pretraining(config: Config, mesh: Mesh) -> Case:
    device = mesh.devices.flat[0]
    teacher = make_teacher(config) if config.distillation.teacher else None
    program = make_program(planning.make_task(config, device, teacher), config, mesh)
    batch = rows()
    if config.data.layout == "pairs":
        batch["type_ids"] = np.where(batch["segment_ids"] == 2, 1, 0).astype(np.int32)
        batch["segment_ids"] = np.minimum(batch["segment_ids"], 1)
        batch["pair_label"] = np.asarray([0, 1] * (ROWS // 2), np.int32)
    if config.spec.data == "parallel":
        del batch["type_ids"]
        batch["segment_ids"] = np.minimum(batch["segment_ids"], 1)
        batch["source"], batch["source_ids"] = batch["tokens"][::-1], batch["segment_ids"][::-1]
        batch["labels"] = np.roll(batch["tokens"], -1, axis=1) * batch["segment_ids"]
    given = (
        ()
        if teacher is None
        else (partitioning.put_params(teacher.params, *program.extra_shardings),)
    )
    return Case(program, batch, given)


def make_finetuning(config: Config, head: str, mesh: Mesh) -> Case:
    width = 2 if head.startswith("span") else 4
    outputs = replace(config, {"outputs.head": head}).outputs
    constants = {}
    if not head.startswith("span"):
        constants = {"outputs": np.arange(width) < 3, "is_regression": np.asarray(False)}
    unused = dict.fromkeys(field.name for field in dataclasses.fields(FinetuneTask))
    used = {"outputs": outputs, "width": width, "losses": LOSSES[head], "constants": constants}
    task = FinetuneTask(**unused | used)
    made = finetuning.Programs(config, jnp.float32, mesh)
    row = np.arange(ROWS, dtype=np.int32)
    batch = rows()
    batch["type_ids"] = np.where(batch["segment_ids"] == 2, 1, 0).astype(np.int32)
    batch["segment_ids"] = np.minimum(batch["segment_ids"], 1)
    of_head = {
        "token": {"tags": np.where(batch["tokens"] % 3 > 0, batch["tokens"] % 3, -1)},
        "span": {"start": 18 + row % 8, "end": 19 + row % 8, "impossible": row % 2},
    }
    of_head["span_beam"] = of_head["span"]
    batch |= of_head.get(head, {"label": row % 3, "value": np.zeros(ROWS, np.float32)})
    batch["weight"] = np.ones(ROWS, np.float32)
    given = (jnp.int32(0), jnp.float32(0), made.put_constants(task))
    return Case(made.of(task, None), batch, given)


@functools.cache
def step(name: str, section: MeshSection) -> tuple[np.ndarray, Params, set[str]]:
    """Return loss, gradients, and the axes over which parameters are sharded."""
    recipe, fields = (STEPS | OF_MIXERS)[name]
    config = make_config(recipe, **fields)
    mesh = partitioning.make_mesh(section, jax.devices()[: math.prod(dataclasses.astuple(section))])
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(mesh):
        patch.setattr(partitioning, "_SMALL", 2**10)  # shard small parameters too
        for module, make in (
            (optimizer, "make_optimizer"),
            (finetuning, "make_injected_lr_optimizer"),
        ):
            patch.setattr(module, make, lambda *_: optax.trace(decay=0.0))  # keeps the gradient
        if recipe == "finetune":
            case = make_finetuning(config, name.rpartition(" ")[2], mesh)
        else:
            case = make_pretraining(config, mesh)
        program = case.program
        params = jax.tree_util.tree_map_with_path(draw, program.abstract.params)
        state, _, vitals = program.train_step(
            program.start(params), program.put_batch(case.batch), *case.given
        )
    places = jax.tree.leaves(program.shardings.params)
    axes = {axis for place in places for axis in place.spec if axis}
    return *jax.device_get((vitals.loss, state.opt_state.trace)), axes


@pytest.mark.parametrize(
    ("name", "axes"), CASES, ids=[f"{name}-{' '.join(axes)}" for name, axes in CASES]
)
def test_it_is_the_step_of_one_device(name, axes):
    section = mesh_of(axes)
    wanted, expected, _ = step(name, MeshSection(data=1))
    loss, gradients, divided = step(name, section)
    assert divided == {"fsdp", "tensor"} & {*axes}
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert_agree(gradients, expected)


@pytest.mark.parametrize("name", ["masked_lm, taught", "replaced_token, masked words first"])
def test_cpus_send_nothing_in_a_loop_over_layers_or_a_branch(name):
    """XLA:CPU confuses messages of a loop or a branch with other messages."""
    recipe, fields = STEPS[name]
    section = MeshSection(data=2, sequence=2)
    mesh = partitioning.make_mesh(section, jax.devices()[:4])
    with jax.set_mesh(mesh):
        case = make_pretraining(make_config(recipe, **(fields | {"model.layers": 2})), mesh)
        program, batch = case.program, jax.eval_shape(case.program.put_batch, case.batch)
        lowered = program.train_step.lower(program.abstract, batch, *case.given)
    text = lowered.compile().as_text()
    sent = find_collectives(text, dataclasses.asdict(section))
    assert {each.times for each in sent} == {1}
    assert " conditional(" not in text
