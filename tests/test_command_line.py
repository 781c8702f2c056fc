"""Command lines, parsed in this process: results and errors."""

import dataclasses
import json
import os
import shlex
import socket
import subprocess
import sys

import pytest
from absl.testing import flagsaver
from hypothesis import example, given, settings
from hypothesis import strategies as st

from convbert_jax import command_line
from convbert_jax.command_line import exit_codes, flags
from convbert_jax.command_line.fields import comments, field_types
from convbert_jax.config import Config, ConfigError, UserError, from_config_dict, to_dict
from tests import refusals

TINY = "--config=configs/tiny.py"


def read(*arguments) -> command_line.Request:
    with flagsaver.flagsaver():
        return command_line.read(["main.py", *map(str, arguments)])


def refused(*arguments, field=None, mentions="") -> str:
    """Returns the one-line error message of a command line."""
    with refusals.refused(UserError, mentions, field=field) as caught:
        read(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_config_file_with_overrides():
    request = read(TINY, "--config.train.steps=1k", "--config.model.head_ratio", "1")
    assert (request.mode, str(request.workdir)) == ("train", "runs/tiny")
    assert (request.config.train.steps, request.config.model.head_ratio) == (1000, 1)
    assert read(*request.config_flags).config == request.config
    assert read("--config=configs/tiny.py:paper", "--workdir=x").config.variant == "paper"


def test_a_runner_and_its_options():
    request = read(TINY, "--mode=prepare")
    assert (request.runner, request.runner_options) == (None, ())
    text = "--runner_options=--direct_num_workers=4 '--labels=a b'"
    request = read(TINY, "--mode=prepare", "--runner=DirectRunner", text)
    assert request.runner == "DirectRunner"
    assert request.runner_options == ("--direct_num_workers=4", "--labels=a b")


def test_a_json_file_is_a_config(tmp_path):
    config = read(TINY).config
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert read(f"--config={tmp_path}/config.json").config == config
    refused(f"--config={tmp_path}/config.json:paper", field="--config")


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        (b"\x7fELF\0\0\1", ""),
        (b"\xff\xfe", ""),
        (b"def get_config(:", "line 1"),
        (b"(" * 5000, ""),
        (b"x = 1", "get_config"),
        (b"get_config = 5", "get_config"),
        (b"\n1 / 0", "line 2 raises ZeroDivisionError"),
        (b"import nowhere_to_be_found", "ModuleNotFoundError"),
        (b"raise SystemExit(3)", "SystemExit: 3"),
        (b"def get_config():\n    raise ValueError('a\\nb')", "line 2 raises ValueError: a."),
        (b"def get_config():\n    return None", "NoneType"),
        (b"def get_config(variant):\n    return {}", "TypeError"),
        (
            b"from convbert_jax.config import to_config_dict\n"
            b"def get_config():\n    c = to_config_dict()\n    c.train.stpes = 3\n    return c",
            "line 4 raises AttributeError",
        ),
    ],
)
def test_config_files_that_are_not_configs(tmp_path, text, mentions):
    (tmp_path / "mine.py").write_bytes(text)
    assert "mine.py" in refused(f"--config={tmp_path}/mine.py", mentions=mentions)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ("{'model': 5}", "config.model"),
        ("{'modle': {}}", "config.modle"),
        ("{'train': {'steps': 1e400}}", "config.train.steps"),
    ],
)
def test_config_files_with_wrong_fields(tmp_path, values, field):
    (tmp_path / "mine.py").write_text(f"def get_config():\n    return {values}")
    refused(f"--config={tmp_path}/mine.py", field=field)


@pytest.mark.parametrize("text", [b"", b"[]", b"5", b"\xff", b'{"train": ', b"[" * 100_000])
def test_json_files_that_are_no_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    refused(f"--config={tmp_path}/config.json", mentions=f"{tmp_path}/config.json")


@pytest.mark.parametrize(
    ("arguments", "field", "mentions"),
    [
        (("--config=configs/tny.py",), "--config", ""),
        ((TINY, "--workdri=x"), "--workdri", ""),
        (("--config=",), "--config", ""),
        (("--config=configs",), "--config", ""),
        ((TINY, "--workdir="), "--workdir", ""),
        ((TINY, "--config.name=a/b"), "config.name", ""),
        ((TINY, "--config.name="), "config.name", ""),
        ((TINY, "--config.train.steps=1e400"), "--config.train.steps", ""),
        ((TINY, "--config.train.steps=1e18"), "config.train.steps", ""),
        ((TINY, "--config.seed=1e19"), "config.seed", ""),
        ((TINY, "--config.tokenizer.vocab_size=1e15"), "config.tokenizer.vocab_size", ""),
        ((TINY, "--config.optimizer.learning_rate=inf"), "--config.optimizer.learning_rate", ""),
        ((TINY, "--config.optimizer.learning_rate=1e39"), "config.optimizer.learning_rate", ""),
        ((TINY, "--config.train.steps=-5"), "config.train.steps", "-5"),
        ((TINY, "--input=x.txt"), "--input", "--mode=train"),
        (
            ("--config=configs/translation.py:tiny", "--config.decoding.top_p=0.9"),
            "config.decoding.top_p",
            "config.decoding.method=beam",
        ),
        (
            ("--config=configs/translation.py:tiny", "--config.train.batch_size=8"),
            "config.train.batch_size",
            "config.parallel",
        ),
        ((TINY, "--topology=v5e:4x4"), "--topology", "--mode=train"),
        ((TINY, "--mode=plan", "--topology=v5e:4x4", "--multihost"), "--multihost", "--mode=plan"),
        ((TINY, "--mode=prepare", "--multihost"), "--multihost", "--mode=prepare"),
        ((TINY, "--mode=plan"), "--topology", "--mode=plan"),
        ((TINY, "--mode=plan", "--topology="), "--topology", ""),
        (("--config=configs/glue.py", "--mode=plan", "--topology=v5e:4x4"), "--mode", ""),
        ((TINY, "--mode=prepare", "--verify_steps=9"), "--verify_steps", ""),
        ((TINY, "--runner=DirectRunner"), "--runner", "--mode=train"),
        ((TINY, "--mode=prepare", "--runner="), "--runner", ""),
        ((TINY, "--mode=prepare", "--runner_options=--x=1"), "--runner_options", "--runner"),
        (
            (TINY, "--mode=prepare", "--runner=DirectRunner", "--runner_options=--x='1"),
            "--runner_options",
            "",
        ),
        (
            (TINY, "--mode=prepare", "--runner=DirectRunner", "--runner_options=x=1"),
            "--runner_options",
            "--NAME=VALUE",
        ),
        (
            (TINY, "--mode=prepare", "--runner=DirectRunner", "--runner_options=--runner=Mine"),
            "--runner_options",
            "--runner",
        ),
        (
            (TINY, "--mode=prepare", "--runner=DirectRunner", "--config.data.workers=2"),
            "--config.data.workers",
            "--runner=DirectRunner",
        ),
        (("--mode=predict", "--workdir=x", "--config.seed=1"), "--config.seed", ""),
        ((TINY, "--mode=predict", "--workdir=x", "--config.seed=1"), "--config.seed", ""),
        ((TINY, "--mode=export", "--config.model.layers=1"), "--config.model.layers", ""),
        (
            ("--mode=export", "--workdir=x", "--config.decoding.beam=2"),
            "--config.decoding.beam",
            "",
        ),
        (("--mode=predict",), "--mode", "--workdir"),
        ((TINY, "--mode=export", "--workdir=x", "--config.name=y"), "--config.name", ""),
        (("--mode=export", "--source=x", "--output=y", "--step=0"), "--step", "--source"),
        (("--mode=export", "--source=x", "--output=y", "--workdir=z"), "--workdir", "--source"),
        (
            ("--config=configs/text.py:own", "--mode=import", "--source=x", "--workdir=y"),
            "--mode",
            "--config.init_from=x",
        ),
        (("--mode=export", "--workdir=x", "--output="), "--output", ""),
        (("--mode=inspect",), "--mode", "--workdir"),
        (("--mode=inspect", "--source=x"), "--output", "--mode=inspect"),
        (("--mode=inspect", "--source=x", "--output=y", "--workdir=z"), "--workdir", ""),
        (("--mode=inspect", "--workdir=x", "--layers=0"), "--layers", "--word"),
        (("--mode=inspect", "--workdir=x", "--word=y", "--layers=0,last"), "--layers", ""),
        (("--mode=inspect", "--workdir=x", "--word="), "--word", ""),
        (("--mode=inspect", "--workdir=x", "--beside="), "--beside", ""),
        (("--mode=export", "--workdir=x", "--word=y"), "--word", "--mode=export"),
        ((TINY, "extra"), "argument", "extra"),
        ((TINY, "--step=two"), "--step", ""),
        ((TINY, "--price=abc"), "--price", ""),
        ((TINY, "--price=-1"), "--price", "-1"),
        ((TINY, "--mode=plan", "--topology=cpu", "--price=nan"), "--price", ""),
        ((TINY, "--processes=x"), "--processes", ""),
        ((TINY, "--process="), "--process", ""),
        ((TINY, "--verify_steps=1"), "--verify_steps", ""),
        ((TINY, "--multihost=maybe"), "--multihost", ""),
        ((TINY, "--verbosity=x"), "--verbosity", ""),
        ((TINY, "--format=x"), "--format", ""),
    ],
)
def test_flags_that_cannot_be_meant(arguments, field, mentions):
    refused(*arguments, field=field, mentions=mentions)


def test_a_config_may_name_the_run_that_is_exported():
    request = read(TINY, "--mode=export", "--config.name=other", "--config.platform=cpu")
    assert (str(request.workdir), request.config.platform) == ("runs/other", "cpu")


@pytest.mark.parametrize("mode", ["predict", "export"])
def test_a_fine_tuned_model_is_used_with_its_config_or_without(mode):
    arguments = ("--config=configs/text.py:own", f"--mode={mode}", "--workdir=x")
    assert read(*arguments).mode == mode


def test_a_model_that_writes_may_write_otherwise():
    request = read(
        "--mode=predict",
        "--workdir=x",
        "--config.decoding.beam=8",
        "--config.decoding.length_penalty=0.5",
    )
    assert request.decoding == {"beam": 8, "length_penalty": 0.5}
    assert request.config is None


def test_who_reads_the_help_may_have_enough():
    """For example `--help | head`."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "convbert_jax.main", TINY, "--help"]
    result = subprocess.run(
        command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False, timeout=100
    )
    os.close(write_end)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    "value",
    ["a=parallel:x=1,y,b=tsv:z", '["a=parallel:x=1,y", "b=tsv:z"]', "a=parallel:x=1,y, b=tsv:z"],
)
def test_test_sets_of_two_files_are_one_set_each(value):
    request = read(TINY, f"--config.decoding.test_sources={value}")
    assert request.config.decoding.tests == (("a", "parallel:x=1,y"), ("b", "tsv:z"))


@pytest.mark.parametrize(
    ("value", "field", "mentions"),
    [
        ("parallel:x,y", "config.decoding.test_sources", "parallel:x,y"),
        ("a=tsv:x,a=tsv:y", "config.decoding.test_sources", "a"),
        ("validation=tsv:x", "config.decoding.test_sources", "validation"),
    ],
)
def test_test_sets_without_a_name_of_their_own(value, field, mentions):
    refused(TINY, f"--config.decoding.test_sources={value}", field=field, mentions=mentions)


def test_what_is_inspected():
    request = read("--mode=inspect", "--workdir=x", "--beside=y", "--word=bank", "--layers=0,11")
    assert (request.beside, request.word, request.layers) == ("y", "bank", (0, 11))
    assert request.config is None


def test_a_path_may_have_a_colon(tmp_path):
    keep(tmp_path / "2025-01-31T10:30", config := read(TINY).config)
    assert read(f"--workdir={tmp_path}/2025-01-31T10:30").config == config
    code = b"import configs.tiny\nget_config = configs.tiny.get_config"
    (tmp_path / "a:b.py").write_bytes(code)
    assert read(f"--config={tmp_path}/a:b.py").config == config


def test_a_named_workdir_needs_no_name_of_a_run():
    assert read(TINY, "--config.name=a/b", "--workdir=x").config.name == "a/b"


def test_a_config_error_of_a_variant_passes():
    refused(TINY + ":papr", mentions="paper")


SMALL = "--config=configs/small.py"  # 1,000,000 steps, a warm-up of 10,000, evaluations each 5,000


def intervals(request: command_line.Request) -> tuple[int, ...]:
    """Returns the warm-up, and the intervals of log lines, evaluations and checkpoints."""
    c = request.config
    return c.optimizer.warmup_steps, c.train.log_every, c.train.eval_every, c.checkpoint.every


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((SMALL,), (10_000, 100, 5_000, 5_000)),
        ((SMALL, "--config.train.steps=2M"), (10_000, 100, 5_000, 5_000)),
        ((SMALL, "--config.train.steps=500k"), (10_000, 100, 5_000, 5_000)),
        ((SMALL, "--config.train.steps=20k"), (2_000, 100, 5_000, 5_000)),
        ((SMALL, "--config.train.steps=1000"), (100, 100, 250, 250)),
        ((SMALL, "--config.train.steps=10"), (1, 1, 10, 10)),
        ((SMALL, "--config.train.steps=1"), (0, 1, 1, 1)),
        ((TINY,), (100, 20, 200, 200)),
        ((TINY, "--config.train.steps=600"), (75, 20, 150, 150)),  # same fraction: 100 of 800
        ((TINY, "--config.train.steps=10", "--config.train.eval_every=3"), (1, 1, 3, 10)),
        ((TINY, "--config.train.steps=10", "--config.optimizer.warmup_steps=10"), (10, 1, 10, 10)),
        ((TINY, "--config.train.steps=10", "--config.checkpoint.every=5k"), (1, 1, 10, 5_000)),
    ],
)
def test_a_short_trial_needs_one_override(arguments, expected):
    request = read(*arguments)
    assert intervals(request) == expected
    assert intervals(read(*arguments)) == expected  # a resume gets the same


def test_a_given_warm_up_that_does_not_fit_is_refused():
    flags = ("--config.train.steps=10", "--config.optimizer.warmup_steps=11")
    refused(TINY, *flags, field="config.optimizer.warmup_steps")


def test_what_was_fitted_is_one_line_of_the_log(caplog):
    with caplog.at_level("INFO", logger="absl"):
        read(TINY, "--config.train.steps=50", "--config.train.log_every=7")
        read(TINY, "--config.train.steps=50k")
        read(TINY, "--config.seed=1")
    (record,) = caplog.records
    fitted = (
        "config.optimizer.warmup_steps=6, config.train.eval_every=50, config.checkpoint.every=50"
    )
    assert record.args == ("50", "800", "configs/tiny.py", fitted)


def test_what_a_run_keeps_is_not_fitted(tmp_path):
    """Neither stored configs nor configs made by `from_config_dict` are adjusted."""
    config = read(SMALL).config
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    flags = (f"--config={tmp_path}/config.json", "--config.train.steps=20k")
    assert intervals(read(*flags)) == (10_000, 100, 5_000, 5_000)
    refused(flags[0], "--config.train.steps=10", field="config.optimizer.warmup_steps")
    with refusals.refused(ConfigError, field="config.optimizer.warmup_steps"):
        from_config_dict({"train": {"steps": 10}})


def keep(folder, config: Config) -> None:
    """Gives `folder` the files of a run of `config`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))


@pytest.mark.parametrize("mode", ["train", "prepare", "eval", "verify_resume"])
def test_a_workdir_alone_is_a_run(tmp_path, mode):
    config = read("--config=configs/tiny.py:paper", "--config.train.steps=30").config
    keep(tmp_path / "run", config)
    request = read(f"--workdir={tmp_path}/run", f"--mode={mode}")
    assert (request.config, request.workdir) == (config, tmp_path / "run")
    assert read(*request.config_flags).config == config
    longer = read(f"--workdir={tmp_path}/run", f"--mode={mode}", "--config.train.steps=90").config
    assert dataclasses.replace(longer, train=config.train) == config
    assert longer.train == dataclasses.replace(config.train, steps=90)


def test_intervals_of_a_trial_are_told_where_it_is_prolonged(tmp_path, caplog):
    keep(tmp_path / "run", read(SMALL, "--config.train.steps=10").config)
    flags = (f"--workdir={tmp_path}/run", "--config.train.steps=1M")
    with caplog.at_level("INFO", logger="absl"):
        read(*flags, "--config.train.log_every=100")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "config.optimizer.warmup_steps=1, config.train.eval_every=10, " in line
    assert "log_every" not in line


def test_the_config_of_an_evaluation_is_that_of_the_run(tmp_path):
    config = read(TINY, "--config.model.layers=2").config
    keep(tmp_path / "run", config)
    asked = (TINY, f"--workdir={tmp_path}/run", "--mode=eval", "--step=7")
    request = read(*asked, "--config.train.eval_rows=0")
    assert (request.step, request.config.model) == (7, config.model)
    assert request.config.train.eval_rows == 0


def test_what_is_no_run_to_go_on_with(tmp_path):
    empty = f"--workdir={tmp_path}/empty"
    refused(empty, field="--config", mentions="configs/base.py")
    refused(empty, field="--config", mentions=f"{tmp_path}/empty")
    refused(empty, "--mode=eval", field="--workdir", mentions=f"{tmp_path}/empty")
    refused("--mode=eval", field="--workdir")
    refused(empty, "--mode=import", "--source=x", field="--config")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    refused(f"--workdir={tmp_path}/damaged", mentions="damaged/config.json")


def test_one_fine_tuned_model_is_no_run(tmp_path):
    config = read("--config=configs/text.py:own").config
    keep(tmp_path / "sweep", config)
    assert read(f"--workdir={tmp_path}/sweep").config == config
    outputs = dataclasses.replace(config.outputs, task="own")
    keep(tmp_path / "sweep/own/seed-0", dataclasses.replace(config, outputs=outputs))
    one = f"--workdir={tmp_path}/sweep/own/seed-0"
    refused(one, field="--workdir")
    refused(one, "--mode=eval", field="--mode")
    refused(one, "--mode=prepare", field="--workdir")


@pytest.mark.parametrize(
    ("flag", "field", "mentions"),
    [
        ("--train.steps=5", "--train.steps", "--config.train.steps"),
        ("--steps=5", "--steps", "--config.train.steps"),
        ("--learning-rate=1e-3", "--learning-rate", "--config.optimizer.learning_rate"),
        ("--conifg.train.steps=5", "--conifg.train.steps", "--config.train.steps"),
        ("--vocab_szie=100", "--vocab_szie", "--config.tokenizer.vocab_size"),
        ("--workdri=x", "--workdri", "--workdir"),
        ("--cofnig=x", "--cofnig", "--config"),
        ("--qqqqqq=x", "--qqqqqq", "--help"),
    ],
)
def test_a_misspelt_flag_leads_to_the_flag_or_the_field(flag, field, mentions):
    refused(TINY, flag, field=field, mentions=mentions)


def help_of(*arguments) -> str:
    with flagsaver.flagsaver():
        return command_line.describe(["main.py", *map(str, arguments)])


def test_help_lists_modes_flags_and_the_way_to_the_fields():
    text = help_of("--help")
    for mode in flags.MODES:
        assert f"\n  {mode} " in text
    for flag in flags.own_flags():
        assert f"\n  --{flag.name} " in text
    for code in exit_codes.EXIT_CODES:
        assert f"\n  {code} " in text
    assert "configs/small.py" in text
    assert "--config=configs/small.py --help" in text
    assert max(map(len, text.splitlines())) <= 150
    assert help_of(TINY) is None


def test_help_of_a_config_lists_every_field_as_an_override(tmp_path):
    text = help_of("--config=configs/tiny.py:paper", "--config.train.steps=5k", "--help")
    config = read("--config=configs/tiny.py:paper", "--config.train.steps=5k").config
    lines = [line for line in text.splitlines() if line.strip("' ").startswith("--config.")]
    given = [shlex.split(line)[0] for line in lines]
    assert len(given) == len(field_types())
    assert read(SMALL, *given).config == config
    assert "\n      nominal heads; head width = hidden_size // heads\n" in text  # within its line
    assert "\n      Release: Adam without it\n" in text
    keep(tmp_path / "run", config)
    assert "--config.train.steps=5000" in help_of(f"--workdir={tmp_path}/run", "--help")


def test_every_comment_of_a_field_is_found():
    """Every comment in the sources of the sections is found."""
    found = comments()
    assert found.keys() == field_types().keys()
    assert found["seed"] == ""
    assert found["model.attention"].startswith("auto: the fastest per platform")
    assert found["model.attention"].endswith("auto | xla | pallas_tpu | cudnn (GPU) | splash (TPU)")
    assert found["mesh.data"] == ""
    assert "span_beam" in found["finetune.beam"]


@pytest.mark.parametrize(
    ("arguments", "field", "mentions"),
    [
        (("--coordinator=localhost:1",), "--coordinator", "--processes"),
        (("--process=0",), "--coordinator", "--processes"),
        (("--coordinator=here", "--processes=2", "--process=0"), "--coordinator", ""),
        (("--coordinator=h:65536", "--processes=2", "--process=0"), "--coordinator", ""),
        (("--coordinator=h:1", "--processes=2", "--process=2"), "--process", ""),
        (("--coordinator=h:1", "--processes=2", "--process=0", "--multihost"), "--multihost", ""),
        (("--coordinator=", "--processes=2", "--process=0"), "--coordinator", ""),
        (("--coordinator=h:1", "--processes=0", "--process=0"), "--processes", ""),
    ],
)
def test_processes_that_are_not_told_apart(arguments, field, mentions):
    refused(TINY, *arguments, field=field, mentions=mentions)


def test_processes_by_flags():
    assert read(TINY).processes is None
    found = read(TINY, "--coordinator=10.0.0.1:8476", "--processes=4", "--process=3").processes
    assert found == command_line.Processes("10.0.0.1:8476", 4, 3)


@pytest.mark.parametrize(
    ("arguments", "field", "mentions"),
    [
        (
            ("--config.checkpoint.best_metric=discriminator_acu",),
            "config.checkpoint.best_metric",
            "discriminator_auc",
        ),
        (("--config.checkpoint.best_metric=release_auc",), "config.checkpoint.best_metric", ""),
        (
            ("--config.checkpoint.best_metric=mlm_loss",),
            "config.checkpoint.best_metric",
            "config.checkpoint.best_mode=min",
        ),
        (
            ("--config.recipe=masked_lm", "--config.checkpoint.best_metric=discriminator_auc"),
            "config.checkpoint.best_metric",
            "",
        ),
    ],
)
def test_a_best_metric_that_no_evaluation_gives(arguments, field, mentions):
    refused(TINY, *arguments, field=field, mentions=mentions)


@pytest.mark.parametrize("index", [0, 1])
def test_processes_that_do_not_come_are_one_sentence(index):
    """The JAX runtime would print a C++ stack trace after such a wait."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    together = [f"--coordinator={address}", "--processes=2", f"--process={index}"]
    code = (
        "import sys\n"
        "from convbert_jax import command_line, console, main\n"
        "request = command_line.read(sys.argv)\n"
        "try:\n"
        "    with main._together(request, timeout=1.0):\n"
        "        pass\n"
        "except main.UserError as error:\n"
        "    console.fail(str(error))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, TINY, *together],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert f"process {1 - index} of 2 " in line.lower()
    command = (
        f"convbert_jax.main {TINY} --coordinator={address} --processes=2 --process={1 - index}"
    )
    assert " within 1 s" in line
    assert f"python -m {command}" in line
    assert "Check failure" not in result.stderr


NAMES = [flag.name for flag in flags.own_flags()] + ["config.train.steps", "verbosity", "x", ""]
NASTY = st.sampled_from(
    ["", "5", "-1", "1e9", "true", "None", "a/b", "..", "\udc80", "train", "eval", "=", "--", "-"]
) | st.text(st.characters(exclude_categories=("Cc",)), max_size=4)
ARGUMENT = st.builds(
    lambda dashes, name, equals, value: f"{dashes}{name}{equals}{value}",
    st.sampled_from(["--", "-", "--no", ""]),
    st.sampled_from(NAMES),
    st.sampled_from(["=", ""]),
    NASTY,
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ARGUMENT | NASTY, max_size=3), st.booleans())
@example(["--nomultihost=5"], True)
@example(["--help"], False)
def test_any_command_line_is_a_request_or_one_sentence(arguments, with_config):
    arguments = [TINY, "--config.init_from=", *arguments] if with_config else arguments
    try:
        sentence = "" if help_of(*arguments) or read(*arguments) else "nothing was asked for"
    except UserError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert sentence != "nothing was asked for"
