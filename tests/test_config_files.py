"""Config files from any folder: shipped files, user files and their imports."""

import concurrent.futures
import os
import sys
import time

import pytest

from convbert_jax import config_files
from convbert_jax.config import ConfigError, UserError
from convbert_jax.sweeps.table import Folder
from convbert_jax.workdir import Workdir
from tests.refusals import refused

MINE = """
from configs import variants
def get_config(variant="default"):
    config = variants.start("mine", variant)
    config.seed = {seed}
    return variants.finish(config)
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Working directory without configs, first on sys.path as with `python -m`.

    The repository is not on sys.path.
    """
    monkeypatch.chdir(tmp_path)
    repository = str(config_files._shipped().parent)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(p for p in sys.path if p != repository)])
    return tmp_path


def steps(value, **changed):
    return config_files.make_config(value, changed).train.steps


def seed(value):
    return config_files.make_config(value, {}).seed


@pytest.mark.parametrize("value", ["configs/tiny.py", "tiny"])
def test_the_package_s_own_from_any_folder(value):
    assert steps(value) == 800
    assert config_files.make_config(f"{value}:paper", {}).variant == "paper"


def test_a_file_of_the_user_s_own_wins(elsewhere):
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "tiny.py").write_text(MINE.format(seed=5))
    assert seed("configs/tiny.py") == seed("tiny") == 5
    (elsewhere / "tiny").write_text(MINE.format(seed=6))
    assert seed("tiny") == 6
    assert steps("base") == 1_000_000
    assert config_files.known_files().count("configs/tiny.py") == 1


def test_a_copy_anywhere_imports_what_the_package_has(elsewhere):
    (elsewhere / "mine.py").write_text(MINE.format(seed=7))
    assert seed("mine.py") == seed(str(elsewhere / "mine.py")) == 7
    (elsewhere / "task.py").write_text((config_files._shipped() / "glue.py").read_text())
    assert config_files.make_config("task.py:cola", {}).finetune.tasks == ("cola",)


def test_a_folder_of_that_name_of_another_project_is_not_in_the_way(elsewhere):
    (elsewhere / "configs").mkdir()
    (elsewhere / "configs" / "__init__.py").write_text("SEED = 8")
    (elsewhere / "configs" / "variants.py").write_text("raise ValueError('not ours')")
    assert seed("small") == 0
    (elsewhere / "configs" / "helper.py").write_text("from configs import SEED")
    (elsewhere / "own.py").write_text(
        "from configs import helper\ndef get_config():\n    return {'seed': helper.SEED}"
    )
    assert seed("own.py") == 8
    (elsewhere / "configs" / "__init__.py").write_text("SEED = 1_009")  # edited between loads
    assert seed("own.py") == 1_009


def test_what_python_has_imported_stays_as_it_was(elsewhere):
    before = {name: module for name, module in sys.modules.items() if name.startswith("configs")}
    (elsewhere / "mine.py").write_text("import configs.variants\n1 / 0")
    with refused(ConfigError, "mine.py", "line 2", "ZeroDivisionError"):
        steps("mine.py")
    after = {name: module for name, module in sys.modules.items() if name.startswith("configs")}
    assert after == before


def test_threads_that_make_configs_do_not_see_each_other(elsewhere):
    for name, seconds in (("first", 0.3), ("second", 0.9)):  # the second starts during the first
        late = f"    import time; time.sleep({seconds})\n    from configs import variants\n"
        (elsewhere / f"{name}.py").write_text(f"def get_config():\n{late}    return {{'seed': 9}}")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(seed, "first.py")
        time.sleep(0.1)
        assert pool.submit(seed, "second.py").result() == first.result() == 9


@pytest.mark.parametrize("name", [b"caf\xe9", b"caf\xe9/run", b"\xff.json"])
def test_a_path_that_is_not_utf8_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(name)
    for open_path in (Workdir, Folder, lambda path: config_files.choose_workdir(path, None)):
        for path in (name, tmp_path / name):
            with pytest.raises(UserError) as caught:
                open_path(path)
            assert name.encode("utf-8", "backslashreplace").decode() in str(caught.value)
            str(caught.value).encode()  # can be printed
    assert not list(tmp_path.iterdir())


def test_a_folder_below_one_that_is_not_utf8_is_refused(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with refused(UserError, r"caf\udce9"):
        config_files.choose_workdir("runs/mine", None)
    assert config_files.choose_workdir(tmp_path / "café", None) == tmp_path / "café"


def test_a_home_of_nobody_is_one_sentence():
    with refused(UserError, "~nobody-here", path="~nobody-here/mine.py"):
        seed("~nobody-here/mine.py")
    with refused(UserError, path="~nobody-here/run"):
        config_files.choose_workdir("~nobody-here/run", None)


def test_a_user_without_a_home_is_one_sentence(monkeypatch):
    """For example, a container that runs with a user id without an account."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 123_456_789)
    with refused(UserError, "HOME", path="~/mine.py"):
        seed("~/mine.py")


@pytest.mark.parametrize("value", ["tny", "configs/tny.py", "other/tiny.py", "tiny.py", ""])
def test_what_is_nowhere_is_answered_with_what_there_is(value):
    with refused(ConfigError, "configs/base.py"):
        steps(value)


def test_changed_fields_are_checked_by_name_and_type():
    assert steps("tiny", **{"train.steps": 50}) == 50
    with refused(ConfigError, "config.train.steps", field="config.train.step"):
        steps("tiny", **{"train.step": 50})
    with refused(ConfigError, field="config.train.steps", value="50"):
        steps("tiny", **{"train.steps": "50"})


def test_a_whole_section_is_not_replaced():
    """A Python sweep row that named a section would reset its other fields to defaults."""
    with refused(ConfigError, "train.steps", field="config.train"):
        config_files.make_config("tiny", {"train": {"steps": 5}})
