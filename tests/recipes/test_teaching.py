"""Distillation: a two-layer student and a four-layer teacher read from a folder."""

import contextlib
import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax import recipes
from convbert_jax.analysis import pretraining_report
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import ConfigError, UserError, to_dict
from convbert_jax.data.tokenizer.tokenizer import train_tokenizer
from convbert_jax.interfaces import SpecialIds
from convbert_jax.interop import conversion
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import split
from convbert_jax.interop.sources import read_source
from convbert_jax.recipes import start as starting
from convbert_jax.recipes import tasks, teaching
from convbert_jax.recipes.teaching import TeacherError
from convbert_jax.training import partitioning, train_step
from convbert_jax.training.checkpoints import Checkpoints, load_arrays
from convbert_jax.training.optimizer import make_optimizer
from convbert_jax.training.train_step import make_program
from convbert_jax.workdir import Workdir
from tests.interop.conftest import random_params
from tests.refusals import refused
from tests.runs import make_config

ALL = {
    "distillation__layers": "uniform",
    "distillation__hidden_weight": 1.0,
    "distillation__attention_weight": 1.0,
    "distillation__embeddings_weight": 1.0,
}


@pytest.fixture(scope="module")
def shared(text, tmp_path_factory):
    """Fields of short runs on one corpus."""
    return {
        "data__source": text,
        "train__steps": 4,
        "train__batch_size": 8,
        "train__log_every": 1,
        "train__eval_every": 4,
        "train__eval_rows": 16,
        "optimizer__warmup_steps": 1,
        "optimizer__learning_rate": 1e-3,
        "checkpoint__every": 2,
    }


@pytest.fixture(scope="module")
def teachers(shared, tmp_path_factory) -> dict:
    """Recipe -> folder of a run: four layers, twice the student's width, random weights."""
    folders = {}
    paragraphs = pathlib.Path(shared["data__source"].removeprefix("text:")).read_text()
    for recipe in ("masked_lm", "replaced_token"):
        config = make_config(
            **shared, recipe=recipe, model__layers=4, model__hidden_size=64,
            model__embedding_size=64, model__heads=4,
        )  # fmt: skip
        folders[recipe] = tmp_path_factory.mktemp("teacher") / recipe
        workdir = Workdir(folders[recipe])
        with workdir.open(config):
            train_tokenizer(paragraphs.split("\n\n"), config.tokenizer, workdir.data(config))
            with contextlib.closing(Checkpoints(workdir.checkpoints, config.checkpoint)) as kept:
                for step in (2, 4):
                    params = jax.tree.map(jnp.asarray, random_params(config, seed=step))
                    made = train_step.create_state(params, make_optimizer(config.optimizer, 4))
                    kept.save(dataclasses.replace(made, step=jnp.int32(step)), {})
    return folders


@pytest.fixture(scope="module")
def make(shared, teachers, tmp_path_factory):
    """make(**fields) -> config of a student with a teacher."""
    folder = tmp_path_factory.mktemp("data")

    def make(recipe="masked_lm", teacher=None, **fields):
        teacher = str(teachers[recipe] if teacher is None else teacher)
        two = {"model__layers": 2, "recipe": recipe, "distillation__teacher": teacher}
        two["data__directory"] = str(folder / recipe)
        return make_config(**shared | two | fields)

    return make


@pytest.fixture(scope="module")
def taught(make, tmp_path_factory):
    """Recipe -> (config as requested, run)."""
    found = {}
    for recipe in ("masked_lm", "replaced_token"):
        mixer = "mixed" if recipe == "masked_lm" else "attention"
        config = make(recipe, model__mixer=mixer, **ALL)
        folder = tmp_path_factory.mktemp("taught") / recipe
        found[recipe] = config, recipes.pretrain(config, folder)
    return found


@pytest.mark.parametrize("recipe", ["masked_lm", "replaced_token"])
def test_a_student_of_another_mixer_and_width(taught, recipe):
    config, result = taught[recipe]
    train = [line for line in result.metrics if line["split"] == "train"]
    parts = {f"distill_{name}" for name in ("logits", "hidden", "attention", "embeddings")}
    for line in train:
        assert parts <= line.keys()
        d = config.distillation
        if recipe == "masked_lm":
            value = line["mlm_loss"] + d.logits_weight * line["distill_logits"]
        else:
            found = line["discriminator_loss"] + line["distill_logits"]
            value = line["mlm_loss"] + config.objective.discriminator_weight * found
        value += sum(line[name] for name in parts - {"distill_logits"})
        assert line["loss"] == pytest.approx(value, rel=1e-4)
    # Evaluation does not run the teacher.
    assert set(result.evaluation) == set(config.heldout_metrics)
    panels = pretraining_report.choose_panels(pretraining_report.arrange_curves(train))
    assert parts <= {name for panel in panels for name in panel.metrics}


def test_resuming_is_exact_and_no_checkpoint_has_the_teacher(taught, tmp_path):
    config, result = taught["replaced_token"]
    folder = shutil.copytree(result.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "4")
    recipes.pretrain(config, folder)
    wanted, found = (load_arrays(Workdir(f).checkpoints, 4)[1] for f in (result.folder, folder))
    assert compare(wanted, found) == []
    _, masked = load_arrays(Workdir(taught["masked_lm"][1].folder).checkpoints, 4)
    for arrays in (found, masked):
        assert not [name for name in arrays if "teacher" in name]
        assert [name for name in arrays if "projections/hidden/kernel" in name]


def test_projections_are_not_exported(taught):
    config, result = taught["masked_lm"]
    kept = Workdir(result.folder).read_config()
    assert kept.distillation.teacher_hidden_size == 64
    networks = read_source(str(result.folder)).networks
    assert not [path for path in networks["main"].parameters if "projection" in path]
    again = recipes.evaluate(config, result.folder)
    assert again.values == pytest.approx(result.evaluation, rel=1e-4, nan_ok=True)


def test_another_teacher_is_refused_and_a_moved_one_is_not(taught, make, teachers, tmp_path):
    config, result = taught["masked_lm"]
    moved = tmp_path / "moved"
    shutil.copytree(teachers["masked_lm"], moved)
    there = dataclasses.replace(config.distillation, teacher=str(moved))
    recipes.pretrain(dataclasses.replace(config, distillation=there), result.folder)
    other = tmp_path / "other"
    shutil.copytree(teachers["masked_lm"], other)
    shutil.rmtree(other / "checkpoints" / "4")  # leaves the weights of step 2
    there = dataclasses.replace(config.distillation, teacher=str(other))
    with refused(TeacherError, field="config.distillation.teacher", value=str(other)):
        recipes.pretrain(dataclasses.replace(config, distillation=there), result.folder)
    none = dataclasses.replace(config.distillation, teacher="")
    with refused(TeacherError, field="config.distillation.teacher", path=result.folder):
        recipes.pretrain(dataclasses.replace(config, distillation=none), result.folder)


def test_a_run_goes_on_where_its_teacher_and_vocabulary_have_moved(taught, teachers, tmp_path):
    """The run uses its own copy of the teacher's vocabulary and accepts no other one."""
    _, result = taught["masked_lm"]
    run, moved = tmp_path / "run", tmp_path / "moved"
    shutil.copytree(result.folder, run)
    shutil.copytree(teachers["masked_lm"], moved)
    workdir = Workdir(run)
    kept = workdir.read_config()
    gone = tmp_path / "gone" / pathlib.Path(kept.tokenizer.path).name
    kept = replace(kept, {"tokenizer.path": str(gone), "distillation.teacher": str(moved)})
    workdir.config.write_text(json.dumps(to_dict(kept)))
    asked = replace(kept, {"tokenizer.path": ""}), kept  # from a config file; from --workdir
    for config in asked:
        found, _ = starting.read_start(config, workdir)
        assert pathlib.Path(found.tokenizer.path).parent == run / "vocabulary"
        assert teaching.open_teacher(found).checksum
        with workdir.open(found):
            assert tasks.open_data(found, workdir).tokenizer.vocab_size == 200
    other = tmp_path / "other.model"
    other.write_bytes(pathlib.Path(found.tokenizer.path).read_bytes() + b"\x1a\x00")
    with refused(UserError, other):
        tasks.open_data(replace(kept, {"tokenizer.path": str(other)}), workdir)


def test_a_plan_counts_the_teacher(make, tmp_path):
    """Memory includes the teacher's parameters, time its forward pass."""
    alone = recipes.plan(make(teacher=""), tmp_path / "run", topology="gpu:h100").numbers
    plan = recipes.plan(make(), tmp_path / "run", topology="gpu:h100")
    numbers = plan.numbers
    config, _ = starting.read_start(make(), Workdir(tmp_path / "run"))
    params = jax.tree.leaves(teaching.open_teacher(config).params)
    assert numbers["memory"]["teacher"] == sum(leaf.size * 4 for leaf in params)
    assert numbers["memory"]["used"] == sum(
        numbers["memory"][name] for name in ("parameters", "gradients", "moments", "kept")
    ) + sum(leaf.size * 4 for leaf in params)
    layer = 4 * 2 * 64 * 64 + 2 * 2 * 32 * 64 + 2 * 2 * 64 * 64
    head = 2 * 64 * (64 + 200) * config.max_predictions / 32
    assert numbers["teacher_flops"] == pytest.approx(8 * 32 * (4 * layer + head))
    assert numbers["flops"] == alone["flops"]
    assert numbers["seconds_of_a_step"][0] > alone["seconds_of_a_step"][0]
    assert alone["memory"]["teacher"] == 0


def test_a_run_without_a_teacher_gets_none_later(teachers, make, tmp_path):
    shutil.copytree(teachers["masked_lm"], tmp_path / "run")
    kept = Workdir(tmp_path / "run").read_config()
    late = dataclasses.replace(kept.distillation, teacher=str(teachers["masked_lm"]))
    with refused(TeacherError, field="config.distillation.teacher", path=tmp_path / "run"):
        recipes.pretrain(dataclasses.replace(kept, distillation=late), tmp_path / "run")


def test_what_a_student_learns_from_logits_alone(make, tmp_path):
    """On one batch, the student's outputs approach the teacher's."""
    asked = make(
        distillation__labels_weight=0.0,
        model__dropout=0.0,
        model__attention_dropout=0.0,
        optimizer__learning_rate=1e-2,
        train__steps=60,
    )
    losses = learn(asked, tmp_path, steps=40)
    assert np.mean(losses[-4:]) < 0.8 * losses[0]


def learn(asked, folder, steps):
    """Return the losses of `steps` steps on one batch of random tokens."""
    config, _ = starting.read_start(asked, Workdir(folder))
    teacher = teaching.open_teacher(config)
    devices = jax.devices()[:1]
    mesh = partitioning.make_mesh(config.mesh, devices)
    special = SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4)
    task = tasks.build_task(config, special, devices[0], teacher)
    tokens = np.random.default_rng(0).integers(5, 200, (8, 32)).astype(np.int32)
    ids = np.ones_like(tokens)
    batch = {"tokens": tokens, "segment_ids": ids, "type_ids": np.zeros_like(tokens)}
    losses = []
    with jax.set_mesh(mesh):
        program = make_program(task, config, mesh)
        given = partitioning.put_params(task.frozen, program.extra_shardings[0])
        state = program.init(jax.random.key(0))
        for _ in range(steps):
            state, _, vitals = program.train_step(state, program.put_batch(batch), given)
            losses.append(float(vitals.loss))
    return losses


def test_a_teacher_from_a_hugging_face_folder_is_the_same(make, teachers, tmp_path):
    """Weights and vocabulary equal those of the exported run."""
    out = conversion.export(teachers["masked_lm"])
    found = []
    for teacher in (teachers["masked_lm"], out):
        config, _ = starting.read_start(make(teacher=teacher), Workdir(tmp_path / "new"))
        found.append(teaching.open_teacher(config))
    first, second = (jax.tree.leaves_with_path(t.params) for t in found)
    for (path, leaf), (other, same) in zip(first, second, strict=True):
        assert path == other
        np.testing.assert_array_equal(leaf, same)


def test_a_student_that_starts_from_its_teacher(make, tmp_path):
    config = make(distillation__initialize=True, **SAME)
    config, _ = starting.read_start(config, Workdir(tmp_path))
    teacher = teaching.open_teacher(config)
    params = starting.fill(config, teaching.start_of(config, teacher))
    ours, theirs = split(config, params)["main"].parameters, teacher.network.parameters
    for path, leaf in ours.items():
        if path.startswith("layers/"):
            layer, rest = path.split("/", 2)[1:]
            path = f"layers/{2 * int(layer) + 1}/{rest}"
        np.testing.assert_array_equal(leaf, theirs[path])


SAME = {"model__hidden_size": 64, "model__embedding_size": 64, "model__heads": 4}
REFUSED = [
    ({"teacher": "nowhere"}, None, None, []),
    ({"tokenizer__vocab_size": 300}, None, None, ["config.tokenizer.vocab_size", 300, 200]),
    ({"model__positions": 64, "data__length": 64}, "config.data.length", 64, [32]),
    (
        {"recipe": "replaced_token", "of": "masked_lm"},
        "config.distillation.logits_weight",
        None,
        ["discriminator"],
    ),
    ({"of": "replaced_token"}, "config.distillation.logits_weight", None, ["masked"]),
    ({"model__layers": 5, **ALL}, "config.model.layers", None, [4, 5]),
    (
        {"model__mixer": "light", "distillation__attention_weight": 1.0},
        "config.distillation.attention_weight",
        None,
        ["0 and 4"],
    ),
    (
        {**ALL, "distillation__attention": "scores"},
        "config.distillation.attention",
        "scores",
        [4, 2],
    ),
    (
        {"distillation__initialize": True},
        "config.distillation.initialize",
        None,
        ["layer 2", "layer 1"],
    ),
    ({"distillation__initialize": True, **SAME, "model__positions": 64}, None, None, [32, 64]),
]


@pytest.mark.parametrize(("fields", "field", "value", "mentions"), REFUSED, ids=str)
def test_unfit_teachers_are_refused_before_data_is_prepared(
    make, teachers, tmp_path, fields, field, value, mentions
):
    fields = dict(fields)
    if of := fields.pop("of", None):
        fields["teacher"] = teachers[of]
    given = {name.replace("__", ".") for name in fields}
    fields["data__directory"] = str(tmp_path / "data")
    mentions = [*mentions, str(fields.get("teacher", teachers[fields.get("recipe", "masked_lm")]))]
    with refused(UserError, *mentions, field=field, value=value) as caught:
        recipes.pretrain(make(**fields), tmp_path / "run", given)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "data").exists()


def test_configs_that_contradict_a_teacher_are_refused(shared):
    for fields, mention in (
        ({"distillation__logits_weight": 0.0}, "config.distillation."),
        ({"distillation__layers": "first"}, "config.distillation.layers"),
        ({"recipe": "replaced_token", "objective__masked_lm_steps": 2}, "masked_lm_steps"),
        ({"distillation__initialize": True, "init_from": "x"}, "config.init_from"),
        (
            {"distillation__teacher": "", "distillation__initialize": True},
            "config.distillation.teacher",
        ),
        ({"recipe": "finetune"}, "finetune"),
    ):
        base = {"recipe": "masked_lm", "distillation__teacher": "somewhere"}
        with refused(ConfigError, mention):
            make_config(**shared | base | fields)
