"""Error messages quote only the beginning of long values."""

import pickle

import pytest
from absl.testing import flagsaver
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import command_line, main
from convbert_jax.command_line.fields import field_types
from convbert_jax.config import ConfigError, TaskSection, UserError, from_config_dict
from convbert_jax.data.errors import DataError, TokenizerError
from convbert_jax.data.tasks import own_task
from convbert_jax.recipes import finetuning

TINY = "--config=configs/tiny.py"
LONG = {"a word": "x" * 5_000, "words": "some words " * 500, "a list": "x,y z," * 900}


def check(message: str, value: str) -> None:
    assert len(message) < 1_700
    assert value[:1_200] not in message


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
@settings(max_examples=40, deadline=None)
@given(path=st.sampled_from(sorted(field_types())))
def test_a_field_of_the_command_line(value, path):
    said = ""  # some fields accept any text
    try:
        with flagsaver.flagsaver():
            command_line.read(["main.py", TINY, "--workdir=x", f"--config.{path}={value}"])
    except UserError as error:
        said = str(error)
    check(said, value)
    assert not said or path.rpartition(".")[2] in said


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
@pytest.mark.parametrize(
    "flag",
    ["--mode={}", "--{}", "{}", "--config.{}=1", "--step={}", "--config=configs/tiny.py:{}"],
)
def test_a_flag(flag, value):
    with flagsaver.flagsaver(), pytest.raises(UserError) as error:
        command_line.read(["main.py", TINY, flag.format(value)])
    check(str(error.value), value)


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
@pytest.mark.parametrize("path", ["recipe", "model.mixer", "no_such_field"])
def test_a_config_from_python(path, value):
    section, _, field = path.rpartition(".")
    with pytest.raises(ConfigError) as error:
        from_config_dict({section: {field: value}} if section else {field: value})
    check(str(error.value), value)


@pytest.mark.parametrize("value", LONG.values(), ids=LONG)
def test_a_task(value, tmp_path):
    finetune = {"tasks": (value,), "data": str(tmp_path)}
    config = from_config_dict({"recipe": "finetune", "finetune": finetune})
    with pytest.raises(UserError) as error:
        finetuning.check_sources(config)
    check(str(error.value), value)


@pytest.mark.parametrize("value", ["x" * 5_000, "some words " * 500], ids=["a word", "words"])
@pytest.mark.parametrize("where", ["a label", "a column"])
def test_a_row_of_a_table(tmp_path, where, value):
    header = ("text", value) if where == "a column" else ("text", "label")
    label = value if where == "a label" else "no"
    for name, labels in (("train", ("yes", "no")), ("dev", ("yes", label))):
        lines = [f"{i},{one}" for i, one in enumerate(labels)]
        (tmp_path / f"{name}.csv").write_text("\n".join([",".join(header), *lines]) + "\n")
    section = TaskSection(folder=str(tmp_path), train="train.csv", validation="dev.csv")
    with pytest.raises(DataError) as error:
        own_task.open_task(section).read("validation")
    check(str(error.value), value)
    assert ".csv" in str(error.value)


@pytest.mark.parametrize("arguments", [["--config={}"], [TINY, "--workdir={}"]])
def test_a_name_too_long_for_a_file_is_an_error_of_one_line(arguments, capsys):
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as end:
        main.main(main._read_command_line(["main.py", *(a.format("x" * 5_000) for a in arguments)]))
    assert end.value.code in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    check(line, "x" * 5_000)


def test_short_values_and_prose_stay_whole():
    text = "Hugging Face's class reads 'a b', " + "the model's words " * 40 + "are the user's."
    assert str(UserError(text)) == text


def test_the_end_of_a_long_message_stays():
    assert str(UserError("many " * 5_000 + "Name another file.")).endswith("Name another file.")


def test_a_cut_message_is_the_same_in_another_process():
    error = TokenizerError("config.name=" + "x" * 5_000)
    assert pickle.loads(pickle.dumps(error)).args == error.args
