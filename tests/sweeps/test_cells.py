"""A sweep becomes cells: ids, configs, folders, and what is refused before anything runs."""

import dataclasses
import runpy

import pytest

from convbert_jax import config_files
from convbert_jax.config import Config, UserError, to_dict
from convbert_jax.interop import matching
from convbert_jax.sweeps import Row, Sweep, SweepError, Task
from convbert_jax.sweeps.cells import check_unchanged, expand
from convbert_jax.sweeps.checks.files import check_files
from convbert_jax.sweeps.folder import FINISHED, Folder, Record

ROWS = {"attention": Row({"model.mixer": "attention"}), "mixed": Row()}
TABLE = Sweep("tiny", ROWS, seeds=(0, 1))
TREC = Task("text:trec", {"finetune.seeds": 3})
PAIRS = Task("text_to_text:tiny", {"parallel.columns": ("text", "label")})
NAMED = runpy.run_path(config_files.__file__.replace("config_files.py", "../configs/ablation.py"))


@pytest.fixture
def folder(tmp_path) -> Folder:
    return Folder(tmp_path / "sweep")


def test_rows_and_seeds_are_cells_in_folders_of_their_own(folder):
    cells = expand(TABLE, folder)
    assert [cell.id for cell in cells] == [
        "attention/seed-0/pretrain",
        "mixed/seed-0/pretrain",
        "attention/seed-1/pretrain",
        "mixed/seed-1/pretrain",
    ]
    assert [cell.config.seed for cell in cells] == [0, 0, 1, 1]
    assert [cell.config.model.mixer for cell in cells] == ["attention", "mixed"] * 2
    assert len({cell.config.data.directory for cell in cells}) == 1
    assert len({folder.run(cell.id).path for cell in cells}) == 4


def test_rows_of_other_data_have_shards_of_their_own(folder):
    rows = {**ROWS, "short": Row({"data.length": 32}), "ahead": Row({"data.prefetch": 3})}
    cells = {cell.row: cell for cell in expand(Sweep("tiny", rows, seeds=(0,)), folder)}
    places = {name: cell.config.data.directory for name, cell in cells.items()}
    assert places["short"] != places["mixed"] == places["attention"] == places["ahead"]
    # The vocabulary of weights is known when they are read.
    others = {"taught": Row({"distillation.teacher": "t"}), "tuned": Row({"init_from": "t"})}
    cells = expand(Sweep("tiny", {**ROWS, **others}, seeds=(0,)), folder)
    assert len({cell.config.data.directory for cell in cells}) == 3
    named = expand(TABLE, folder, {"data.directory": "elsewhere"})
    assert {cell.config.data.directory for cell in named} == {"elsewhere"}


def test_rows_of_other_vocabularies_have_shards_of_their_own(folder):
    """Where a vocabulary lies may change in a run, but tells rows apart."""
    config = Config()
    named = [matching.replace(config, {"tokenizer.path": p}) for p in ("", "a.txt", "b.txt")]
    assert len({folder.data(each) for each in named}) == 3


def test_tasks_follow_each_pretraining(folder):
    sweep = dataclasses.replace(TABLE, tasks={"trec": TREC}, from_scratch=True)
    overrides = {"train.steps": 50, "task.folder": "D", "platform": "cpu"}
    cells = {cell.id: cell for cell in expand(sweep, folder, overrides)}
    assert len(cells) == 2 * 2 * 3
    tuned = cells["mixed/seed-1/trec"]
    assert tuned.after == "mixed/seed-1/pretrain"
    assert tuned.config.init_from == str(folder.run(tuned.after).path)
    assert (tuned.config.seed, tuned.config.finetune.seeds) == (3, 3)  # 3, 4, 5 after 0, 1, 2
    assert (tuned.config.task.folder, tuned.config.finetune.from_scratch) == ("D", False)
    assert cells["mixed/seed-1/trec-scratch"].config.finetune.from_scratch
    before = cells["mixed/seed-1/pretrain"].config
    assert (before.train.steps, before.task.folder) == (50, "")
    assert before.platform == tuned.config.platform == "cpu"


def test_what_a_task_has_of_its_own_comes_before_what_all_have(folder):
    tasks = {"trec": TREC, "long": Task("text:trec", {"finetune.epochs": (12.0,)})}
    sweep = dataclasses.replace(TABLE, tasks=tasks)
    overrides = {"task.folder": "D", "finetune.epochs": (4.0,), "finetune.seeds": 2}
    cells = {cell.id: cell.config for cell in expand(sweep, folder, overrides)}
    trec, long = cells["mixed/seed-1/trec"].finetune, cells["mixed/seed-1/long"].finetune
    assert (trec.epochs, long.epochs) == ((4.0,), (12.0,))
    assert (trec.seeds, long.seeds) == (3, 2)
    alone = dataclasses.replace(TABLE, tasks={"trec": TREC})
    with pytest.raises(SweepError, match=r"--config.finetune.seeds is for all tasks, and each"):
        expand(alone, folder, overrides)


def test_pairs_of_texts_follow_span_corruption(folder, tmp_path):
    sweep = config_files.load_sweep("ablation:pretrained_sequences")
    sweep = dataclasses.replace(sweep, seeds=(0, 1), tasks={"topics": PAIRS})
    overrides = {"train.steps": 50, "parallel.source": f"tsv:{tmp_path / 'train.tsv'}"}
    cells = {cell.id: cell for cell in expand(sweep, folder, overrides)}
    assert len(cells) == 4 * 2 * 3
    tuned, scratch = (cells[f"light/seed-1/topics{end}"].config for end in ("", "-scratch"))
    assert (tuned.recipe, tuned.seed) == ("text_to_text", 1)
    assert (tuned.parallel.from_scratch, scratch.parallel.from_scratch) == (False, True)
    assert tuned.init_from == scratch.init_from
    before = cells["light/seed-1/pretrain"].config
    assert (before.train.steps, before.parallel.source) == (50, "")
    assert (tuned.train.steps, tuned.parallel.source) == (3_000, overrides["parallel.source"])
    with pytest.raises(SweepError, match=r"^task topics: .*train\.tsv"):
        check_files(cells.values(), folder)
    (tmp_path / "train.tsv").write_text("text\tlabel\na b\tc\n")
    check_files(cells.values(), folder)
    for task, config in (("t", "text:trec"), ("t", "tiny")):
        with pytest.raises(SweepError, match="after 'span_corruption' comes translation or"):
            expand(dataclasses.replace(sweep, tasks={task: Task(config)}), folder)


def test_files_of_tasks_are_looked_for_before_anything_runs(folder, tmp_path):
    lines = "DESC:manner How ?\nNUM:date When ?\n"
    for name in ("train.txt", "test.txt"):
        (tmp_path / name).write_text(lines)
    sweep = dataclasses.replace(TABLE, tasks={"trec": TREC})
    check_files(expand(sweep, folder, {"task.folder": str(tmp_path)}), folder)
    with pytest.raises(SweepError, match=r"^task trec: "):
        check_files(expand(sweep, folder, {"task.folder": str(tmp_path / "elsewhere")}), folder)
    alike = dataclasses.replace(sweep, rows={"trec": Row()})
    with pytest.raises(SweepError, match=r"^task trec: "):
        check_files(expand(alike, folder, {"task.folder": str(tmp_path / "elsewhere")}), folder)
    alone = Sweep("text:trec", {"row": Row()}, changes={"init_from": "somewhere"})
    with pytest.raises(SweepError, match=r"^row row: "):
        check_files(expand(alone, folder), folder)


def test_fine_tuning_alone_is_one_run_a_cell(folder):
    rows = {"slow": Row({"finetune.learning_rates": (1e-4,)}), "fast": Row()}
    sweep = Sweep("text:trec", rows, seeds=(4, 7), changes={"init_from": "somewhere"})
    cells = expand(sweep, folder)
    assert [cell.id for cell in cells][:2] == ["slow/seed-4/finetune", "fast/seed-4/finetune"]
    assert {cell.config.finetune.seeds for cell in cells} == {1}


@pytest.mark.parametrize(
    ("name", "flags", "says"),
    [
        # of all rows: none of them is named, least of all one that only comes first
        ("mixers", {"model.stages": [{"layers": 2}]}, "config.model.stages has 2 layers, but"),
        (
            "mixers",
            {"model.stages": [{"layers": 4, "mixer": "mixed"}]},
            "rows attention and mixed are the same model with --config.model.stages=[{",
        ),
        (
            "kernel_size",
            {"model.kernel_sizes": (3, 3, 5, 7), "train.steps": 50},
            "rows k1 and k9 are the same model with --config.model.kernel_sizes=3,3,5,7: it",
        ),
        # of one row and what all have, together
        (
            "bnk_gl_sdconv",
            {"model.head_ratio": 4, "train.steps": 50},
            "row attention with --config.model.head_ratio=4: config.model.head_ratio=4 does",
        ),
        (
            "length",
            {"data.directory": "x"},
            "--config.data.directory=x cannot have the rows of tokens of mixed-64 and of mixed-128",
        ),
        ("mixers", {"finetune.seeds": 3}, "--config.finetune.seeds is of fine-tuning, and no task"),
        ("mixers", {"task.folder": "x"}, "--config.task.folder is of fine-tuning, and no task"),
    ],
)
def test_what_is_set_for_all_rows_is_blamed_for_itself(folder, name, flags, says):
    with pytest.raises(SweepError) as caught:
        expand(config_files.load_sweep(f"ablation:{name}"), folder, flags)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"init_from": "nowhere"}, "row attention: .*nowhere"),
        ({"distillation.teacher": "nowhere"}, "row attention: .*nowhere"),
        ({"tokenizer.path": "nowhere.txt"}, r"row attention: .*nowhere\.txt"),
        ({"data.source": "text:nowhere/*.txt"}, r"row attention: .*nowhere/\*\.txt"),
    ],
)
def test_what_runs_start_from_is_looked_for_before_any_begins(folder, overrides, says):
    cells = expand(TABLE, folder, overrides)
    with pytest.raises(SweepError, match=f"^{says}"):
        check_files(cells, folder)
    for cell in cells:  # a finished cell needs nothing any more
        folder.write(Record(cell.id, FINISHED, to_dict(cell.config), ("main",)))
    check_files(cells, folder)


def test_texts_of_pairs_are_looked_for_before_any_run_begins(folder):
    sweep = config_files.load_sweep("ablation:translation")
    cells = expand(sweep, folder, {"parallel.source": "tsv:nowhere.tsv"})
    with pytest.raises(SweepError, match=r"^row attention: .*nowhere\.tsv"):
        check_files(cells, folder)


@pytest.mark.parametrize(
    ("changes", "overrides", "says"),
    [
        ({"rows": {}}, {}, "has no rows or no seeds"),
        ({"seeds": (1, 1)}, {}, "one twice"),
        ({"rows": {"a/b": Row()}}, {}, "'a/b' is no name of a folder"),
        ({"rows": {"x": {"model.layers": 2}}}, {}, "row x is a dict; make it a Row"),
        ({"rows": {"x": Row({"model.layres": 2})}}, {}, "row x: config.model.layres does not"),
        ({"rows": {"x": Row({"model.mixer": "magic"})}}, {}, "row x: config.model.mixer='magic'"),
        (
            {"rows": {"x": Row({"model.heads": 3})}},
            {},
            "row x: config.model.hidden_size=128 is not",
        ),
        ({"rows": {"x": Row(), "y": Row()}}, {}, "rows x and y are the same config"),
        (
            {"rows": {"x": Row(), "y": Row({"model.kernel_size": 3})}},
            {"model.mixer": "attention"},
            "rows x and y are the same model with --config.model.mixer=attention: it does not read "
            "config.model.kernel_size; leave out one row or --config.model.mixer.",
        ),
        (
            {"rows": {"x": Row(), "y": Row({"generator.size": 1.0})}},
            {"recipe": "masked_lm"},
            "rows x and y are the same model with --config.recipe=masked_lm: it does not read "
            "config.generator.size; leave out one row or --config.recipe.",
        ),
        (
            {
                "rows": {
                    "x": Row({"model.mixer": "attention"}),
                    "y": Row({"model.mixer": "attention", "model.kernel_size": 3}),
                }
            },
            {},
            "rows x and y are the same model: it does not read config.model.kernel_size; leave out "
            "one row.",
        ),
        ({"rows": {"x": Row(flops_of="z")}}, {}, "row x has flops_of=z, which is no row"),
        (
            {"config": "text:own", "rows": {"x": Row(), "y": Row(flops_of="x")}},
            {},
            "flops_of, which is of pre-training on a corpus, and config.recipe=finetune is not",
        ),
        (
            {"rows": {"x": Row(), "y": Row({"objective.masked_lm_steps": 5}, flops_of="x")}},
            {},
            "row y has flops_of and config.objective.masked_lm_steps=5, which costs",
        ),
        (
            {"rows": {"x": Row(), "y": Row({"distillation.teacher": "t"}, flops_of="x")}},
            {},
            "row y has flops_of, and config.distillation.teacher=t spends FLOPs that are not",
        ),
        ({"rows": [Row()]}, {}, "rows is a list; make it a dict"),
        ({"seeds": 3}, {}, "seeds=3 must be a tuple of int"),
        ({"metrics": "mlm_loss"}, {}, "metrics='mlm_loss' must be a tuple of str"),
        ({"tasks": {"t": "text:own"}}, {}, "task t is a str; make it a Task"),
        ({"tasks": {"t": Task("text:trec", {"seed": 9})}}, {}, "task t has config.seed, which"),
        ({"rows": {"x": Row({"seed": 7})}}, {}, "changes config.seed; use the seeds of the"),
        (
            {"config": "text:own", "rows": {"x": Row({"finetune.seeds": 3})}, "tasks": {}},
            {},
            "row x has config.finetune.seeds=3, but each cell",
        ),
        ({"baseline": "z"}, {}, "baseline=z is no row; rows: attention, mixed"),
        ({}, {"model.mixer": "mixed"}, "--config.model.mixer is what the cells differ in"),
        ({}, {"seed": 4}, "take --seeds=N"),
        ({}, {"train.batch_size": 0}, "config.train.batch_size=0"),
        ({"from_scratch": True}, {}, "names none; add --finetune="),
        ({"tasks": {"pretrain": TREC}}, {}, "a task cannot be called pretrain"),
        ({"tasks": {"t": Task("tiny")}}, {}, "after 'replaced_token' comes finetune."),
        ({"tasks": {"t": Task("text:nothing")}}, {}, "task t: "),
        ({"config": "nowhere"}, {}, "there is no file nowhere"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_name(folder, changes, overrides, says):
    with pytest.raises(SweepError) as caught:
        expand(dataclasses.replace(TABLE, **changes), folder, overrides)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_has_begun_keeps_its_config(folder):
    cells = expand(TABLE, folder)
    for cell in cells[:2]:
        folder.write(Record(cell.id, FINISHED, to_dict(cell.config), ("main",)))
    assert check_unchanged(cells, folder) == (2, [])
    more = expand(dataclasses.replace(TABLE, seeds=(0, 1, 2)), folder)
    assert check_unchanged(more, folder) == (4, [])
    fewer = expand(dataclasses.replace(TABLE, rows={"mixed": Row()}), folder)
    assert check_unchanged(fewer, folder) == (1, ["attention/seed-0/pretrain"])
    # how fast and where may change, what is compared may not, though a run alone may be longer
    assert check_unchanged(expand(TABLE, folder, {"data.workers": 7}), folder)
    assert check_unchanged(expand(TABLE, folder, {"decoding.batch_tokens": 7}), folder)
    for field, value in (
        ("train.steps", 50),
        ("optimizer.beta1", 0.8),
        ("model.layers", 2),
        ("decoding.beam", 1),
        ("distillation.teacher", "another"),
    ):
        with pytest.raises(SweepError) as caught:
            check_unchanged(expand(TABLE, folder, {field: value}), folder)
        assert f"config.{field} was" in str(caught.value)
        assert "choose another --workdir" in str(caught.value)


def test_a_cell_that_only_began_may_change(folder):
    cells = expand(TABLE, folder)
    folder.write(Record(cells[0].id, "started", to_dict(cells[0].config), ("main",)))
    check_unchanged(expand(TABLE, folder, {"train.steps": 50}), folder)


def test_a_damaged_record_is_named(folder):
    cells = expand(TABLE, folder)
    folder.write(Record(cells[0].id, FINISHED, to_dict(cells[0].config), ("main",)))
    path = next(folder.path.rglob("*.json"))
    whole = path.read_text()
    text = whole.replace('"values": {}', '"values": {"acc": "0.5"}')
    assert text != whole
    for content in ("{", '{"state": "finished"}', whole.replace("finished", "odd"), text):
        path.write_text(content)
        with pytest.raises(UserError, match=r"pretrain\.json is damaged .*; delete it"):
            check_unchanged(cells, folder)


def test_a_record_of_another_version_is_named(folder):
    cells = expand(TABLE, folder)
    config = to_dict(cells[0].config) | {"magic": 1}
    folder.write(Record(cells[0].id, FINISHED, config, ("main",)))
    with pytest.raises(
        SweepError, match=r"attention/seed-0/pretrain\.json: config\.magic does not"
    ):
        check_unchanged(cells, folder)


@pytest.mark.parametrize("size", list(NAMED["SIZES"]))
@pytest.mark.parametrize("name", list(NAMED["SWEEPS"]))
def test_the_named_sweeps_can_run(folder, name, size):
    sweep = config_files.load_sweep(f"ablation:{name},{size}")
    sweep = dataclasses.replace(sweep, seeds=(0,))
    if sweep.from_scratch:
        task = PAIRS if "span_corruption" in sweep.config else TREC
        sweep = dataclasses.replace(sweep, tasks={"trec": task})
    assert expand(sweep, folder)
    assert sweep.purpose
