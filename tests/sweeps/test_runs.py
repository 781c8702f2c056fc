"""Expansion of a sweep into runs; invalid sweeps are rejected before any run starts."""

import dataclasses
import runpy

import pytest

from convbert_jax import config_files
from convbert_jax.config import Config, to_dict
from convbert_jax.interop import matching
from convbert_jax.storage import DamagedFileError
from convbert_jax.sweeps import Search, Sweep, SweepError, Task, Variant
from convbert_jax.sweeps.runs import check_files, check_unchanged, expand
from convbert_jax.sweeps.table import FINISHED, STARTED, Record
from tests.refusals import refused

VARIANTS = {"attention": Variant({"model.mixer": "attention"}), "mixed": Variant()}
SWEEP = Sweep("tiny", VARIANTS, seeds=(0, 1))
TREC = Task("text:trec", {"finetune.seeds": 3})
PAIRS = Task("text_to_text:tiny", {"parallel.columns": ("text", "label")})
ABLATION = runpy.run_path(
    config_files.__file__.replace("config_files.py", "../configs/ablation.py")
)
FIRST = "attention/seed-0/pretrain"


def record(run, state=FINISHED) -> Record:
    return Record(run.id, state, to_dict(run.config), ("main",))


def test_variants_and_seeds_are_runs_in_folders_of_their_own(folder):
    runs = expand(SWEEP, folder)
    assert [run.id for run in runs] == [
        *(FIRST, "mixed/seed-0/pretrain"),
        *("attention/seed-1/pretrain", "mixed/seed-1/pretrain"),
    ]
    assert [run.config.seed for run in runs] == [0, 0, 1, 1]
    assert [run.config.model.mixer for run in runs] == ["attention", "mixed"] * 2
    assert len({run.config.data.directory for run in runs}) == 1
    assert len({folder.run(run.id).path for run in runs}) == 4
    named = expand(SWEEP, folder, {"data.directory": "elsewhere"})
    assert {run.config.data.directory for run in named} == {"elsewhere"}


def test_runs_share_shards_only_if_their_data_is_the_same(folder):
    variants = {
        **VARIANTS,
        "short": Variant({"data.length": 32}),
        "ahead": Variant({"data.prefetch": 3}),
        "distilled": Variant({"distillation.teacher": "t"}),  # teacher sets the vocabulary
        "tuned": Variant({"init_from": "t"}),
    }
    runs = expand(Sweep("tiny", variants, seeds=(0,)), folder)
    place = {run.variant: run.config.data.directory for run in runs}
    assert place["attention"] == place["mixed"] == place["ahead"]
    assert len({place[name] for name in ("mixed", "short", "distilled", "tuned")}) == 4
    by_vocabulary = [matching.replace(Config(), {"tokenizer.path": p}) for p in ("", "a", "b")]
    assert len({folder.data(config) for config in by_vocabulary}) == 3


def test_tasks_follow_each_pretraining_run(folder):
    sweep = dataclasses.replace(SWEEP, tasks={"trec": TREC}, from_scratch=True)
    overrides = {"train.steps": 50, "task.folder": "D", "platform": "cpu"}
    runs = {run.id: run for run in expand(sweep, folder, overrides)}
    assert len(runs) == 2 * 2 * 3
    tuned = runs["mixed/seed-1/trec"]
    assert tuned.after == "mixed/seed-1/pretrain"
    assert tuned.config.init_from == str(folder.run(tuned.after).path)
    assert (tuned.config.seed, tuned.config.finetune.seeds) == (3, 3)  # 3, 4, 5 after 0, 1, 2
    assert (tuned.config.task.folder, tuned.config.finetune.from_scratch) == ("D", False)
    assert runs["mixed/seed-1/trec-scratch"].config.finetune.from_scratch
    before = runs["mixed/seed-1/pretrain"].config
    assert (before.train.steps, before.task.folder) == (50, "")
    assert before.platform == tuned.config.platform == "cpu"


def test_changes_of_a_task_take_precedence_over_overrides(folder):
    tasks = {"trec": TREC, "long": Task("text:trec", {"finetune.epochs": (12.0,)})}
    overrides = {"task.folder": "D", "finetune.epochs": (4.0,), "finetune.seeds": 2}
    sweep = dataclasses.replace(SWEEP, tasks=tasks)
    runs = {run.id: run.config for run in expand(sweep, folder, overrides)}
    trec, long = runs["mixed/seed-1/trec"].finetune, runs["mixed/seed-1/long"].finetune
    assert (trec.epochs, long.epochs) == ((4.0,), (12.0,))
    assert (trec.seeds, long.seeds) == (3, 2)
    with refused(SweepError, field="--config.finetune.seeds"):  # no task would use it
        expand(dataclasses.replace(SWEEP, tasks={"trec": TREC}), folder, overrides)


def test_text_pairs_follow_span_corruption(folder, tmp_path):
    sweep = config_files.load_sweep("ablation:pretrained_sequences")
    sweep = dataclasses.replace(sweep, seeds=(0, 1), tasks={"topics": PAIRS})
    overrides = {"train.steps": 50, "parallel.source": f"tsv:{tmp_path / 'train.tsv'}"}
    runs = {run.id: run for run in expand(sweep, folder, overrides)}
    assert len(runs) == 4 * 2 * 3
    tuned, scratch = (runs[f"light/seed-1/topics{end}"].config for end in ("", "-scratch"))
    assert (tuned.recipe, tuned.seed) == ("text_to_text", 1)
    assert (tuned.parallel.from_scratch, scratch.parallel.from_scratch) == (False, True)
    assert tuned.init_from == scratch.init_from
    before = runs["light/seed-1/pretrain"].config
    assert (before.train.steps, before.parallel.source) == (50, "")
    assert (tuned.train.steps, tuned.parallel.source) == (3_000, overrides["parallel.source"])
    with refused(SweepError, "task topics", "train.tsv"):
        check_files(runs.values(), folder)
    (tmp_path / "train.tsv").write_text("text\tlabel\na b\tc\n")
    check_files(runs.values(), folder)
    with refused(SweepError, "task t", "translation", field="config.recipe", value="finetune"):
        expand(dataclasses.replace(sweep, tasks={"t": Task("text:trec")}), folder)


def test_each_run_of_a_finetuning_sweep_is_one_seed(folder):
    variants = {"slow": Variant({"finetune.learning_rates": (1e-4,)}), "fast": Variant()}
    sweep = Sweep("text:trec", variants, seeds=(4, 7), changes={"init_from": "somewhere"})
    runs = expand(sweep, folder)
    assert [run.id for run in runs][:2] == ["slow/seed-4/finetune", "fast/seed-4/finetune"]
    assert {run.config.finetune.seeds for run in runs} == {1}
    assert not any(run.config.finetune.save_models for run in runs)
    with refused(SweepError, "variant slow"):
        check_files(runs, folder)
    three = dataclasses.replace(sweep, variants={"x": Variant({"finetune.seeds": 3})})
    with refused(SweepError, "variant x", field="config.finetune.seeds", value=3):
        expand(three, folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_from", "nowhere"),
        ("distillation.teacher", "nowhere"),
        ("tokenizer.path", "nowhere.txt"),
        ("data.source", "text:nowhere/*.txt"),
    ],
)
def test_missing_input_files_are_reported_before_any_run_starts(folder, field, value):
    runs = expand(SWEEP, folder, {field: value})
    with refused(SweepError, "variant attention", value.removeprefix("text:")):
        check_files(runs, folder)
    for run in runs:  # finished runs need no input
        folder.write(record(run))
    check_files(runs, folder)


def test_missing_files_of_tasks_and_of_text_pairs_are_reported(folder, tmp_path):
    lines = "DESC:manner How ?\nNUM:date When ?\n"
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(lines)
    sweep = dataclasses.replace(SWEEP, variants={"trec": Variant()}, tasks={"trec": TREC})
    check_files(expand(sweep, folder, {"task.folder": str(tmp_path)}), folder)
    with refused(SweepError, "task trec"):
        check_files(expand(sweep, folder, {"task.folder": str(tmp_path / "no")}), folder)
    pairs = config_files.load_sweep("ablation:translation")
    with refused(SweepError, "variant attention", "nowhere.tsv"):
        check_files(expand(pairs, folder, {"parallel.source": "tsv:nowhere.tsv"}), folder)


def pair(variant: Variant, config: str = "tiny", **fields) -> Sweep:
    return Sweep(config, {"x": Variant(), "y": variant}, **fields)


SPACE = {"model.layers": (1,)}


def test_an_invalid_definition_is_refused():
    for mention, make in (
        ("variants", lambda: Sweep("tiny", {})),
        ("seeds=1,1", lambda: Sweep("tiny", VARIANTS, seeds=(1, 1))),
        ("a/b", lambda: Sweep("tiny", {"a/b": Variant()})),
        ("dict", lambda: Sweep("tiny", {"x": {"model.layers": 2}})),
        ("'pretrain'", lambda: changed(tasks={"pretrain": TREC})),
        ("a-scratch", lambda: changed(tasks={"a-scratch": TREC}, from_scratch=True)),
        ("baseline=z", lambda: changed(baseline="z")),
        ("config.seed", lambda: pair(Variant({"seed": 7}))),
        ("config.seed", lambda: Task("text:trec", {"seed": 9})),
        ("match_flops_of=z", lambda: pair(Variant(match_flops_of="z"))),
        ("match_flops_of=y", lambda: pair(Variant(match_flops_of="y"))),
        ("train.steps", lambda: Variant({"train.steps": 7}, match_flops_of="x")),
        ("space={}", lambda: Search({}, 1, "m", True)),
        ("model.layers", lambda: Search({"model.layers": ()}, 1, "m", True)),
        ("trials=0", lambda: Search(SPACE, 0, "m", True)),
        ("model.layers", lambda: Search({"model.layer": (1,)}, 1, "m", True)),
        ("budget_of=z", lambda: changed(search=Search(SPACE, 1, "m", True, budget_of="z"))),
    ):
        with refused(SweepError, mention):
            make()


def changed(**fields) -> Sweep:
    return dataclasses.replace(SWEEP, **fields)


@pytest.mark.parametrize(
    ("field", "mention", "sweep", "overrides"),
    [
        # rules that name one variant
        (None, "variant y", pair(Variant({"model.layres": 2})), {}),
        (None, "variant attention", "bnk_gl_sdconv", {"model.head_ratio": 4}),
        ("match_flops_of", "variant y", pair(Variant(match_flops_of="x"), "text:own"), {}),
        (
            *("match_flops_of", "variant y"),
            *(pair(Variant({"objective.masked_lm_steps": 5}, "x")), {}),
        ),
        ("match_flops_of", "variant y", pair(Variant({"distillation.teacher": "t"}, "x")), {}),
        # rules for all variants
        (None, "config.model.stages", "mixers", {"model.stages": [{"layers": 2}]}),
        (None, "config.train.batch_size", SWEEP, {"train.batch_size": 0}),
        (None, "nowhere", changed(config="nowhere"), {}),
        ("--config.model.mixer", "", SWEEP, {"model.mixer": "mixed"}),
        ("--config.seed", "--seeds", SWEEP, {"seed": 4}),
        ("--config.data.directory", "mixed-128", "length", {"data.directory": "D"}),
        # equal variants
        (None, "x and y", pair(Variant()), {}),
        (None, "config.model.kernel_size", "kernel_size", {"model.kernel_sizes": (3, 3, 5, 7)}),
        (
            *(None, "config.generator.size"),
            *(pair(Variant({"generator.size": 1.0})), {"recipe": "masked_lm"}),
        ),
        # task settings
        ("--config.finetune.seeds", "--finetune", SWEEP, {"finetune.seeds": 3}),
        ("--finetune", "", changed(from_scratch=True), {}),
        ("config.recipe", "task t", changed(tasks={"t": Task("tiny")}), {}),
        ("config.recipe", "text:trec", changed(config="text:trec", tasks={"t": TREC}), {}),
    ],
)
def test_an_invalid_run_is_refused_with_the_cause(folder, field, mention, sweep, overrides):
    if isinstance(sweep, str):
        sweep = dataclasses.replace(config_files.load_sweep(f"ablation:{sweep}"), seeds=(0,))
    with refused(SweepError, mention, field=field) as caught:
        expand(sweep, folder, overrides)
    assert "\n" not in str(caught.value)
    assert ("variant " in str(caught.value)) == ("variant" in mention)


def test_a_run_that_has_started_keeps_its_config(folder):
    runs = expand(SWEEP, folder)
    for run in runs[:2]:
        folder.write(record(run))
    folder.write(record(runs[2], STARTED))  # no checkpoint: its config may change
    assert check_unchanged(runs, folder) == (1, [])
    more = expand(dataclasses.replace(SWEEP, seeds=(0, 1, 2)), folder)
    assert check_unchanged(more, folder) == (3, [])
    fewer = expand(Sweep("tiny", {"mixed": Variant()}, seeds=(0,)), folder)
    assert check_unchanged(fewer, folder) == (0, [FIRST, "attention/seed-1/pretrain"])
    # Paths and speed settings may change. Compared settings may not, even if a single run allows
    # it.
    for path, value in (("data.workers", 7), ("decoding.batch_tokens", 7)):
        check_unchanged(expand(SWEEP, folder, {path: value}), folder)
    for path, value in (
        ("train.steps", 50),
        ("optimizer.beta1", 0.8),
        ("model.layers", 2),
        ("decoding.beam", 1),
        ("distillation.teacher", "another"),
    ):
        changed = expand(SWEEP, folder, {path: value})
        with refused(SweepError, FIRST, f"config.{path}", value, path=folder.path):
            check_unchanged(changed, folder)


def test_a_damaged_record_is_refused(folder):
    (run, *_) = runs = expand(SWEEP, folder)
    folder.write(record(run))
    path = folder.file(run.id, ".json")
    whole = path.read_text()
    for content in (
        *("{", '{"state": "finished"}', whole.replace("finished", "odd")),
        whole.replace('"values": {}', '"values": {"acc": "0.5"}'),
    ):
        assert content != whole
        path.write_text(content)
        with refused(DamagedFileError, path):
            check_unchanged(runs, folder)
    folder.write(dataclasses.replace(record(run), config={"magic": 1}))  # config of another version
    with refused(SweepError, path, "config.magic"):
        check_unchanged(runs, folder)


@pytest.mark.parametrize("name", list(ABLATION["SWEEPS"]))
def test_the_named_sweeps_are_valid_in_all_sizes(folder, name):
    for size in ["tiny"] if name == "length" else ABLATION["SIZES"]:
        sweep = config_files.load_sweep(f"ablation:{name},{size}")
        sweep = dataclasses.replace(sweep, seeds=(0,))
        if sweep.from_scratch:
            task = PAIRS if "span_corruption" in sweep.config else TREC
            sweep = dataclasses.replace(sweep, tasks={"trec": task})
        assert expand(sweep, folder)
        assert sweep.purpose
