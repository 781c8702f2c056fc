"""Untrusted folders: no mode and no function executes code that they name."""

import dataclasses
import json
import pathlib
import shutil
import sys

import pytest
from absl.testing import flagsaver

import convbert_jax
from convbert_jax import main, storage
from convbert_jax.config import Config, PluginError, UserError, mixers, plugins, to_dict
from convbert_jax.data.errors import DataError
from convbert_jax.data.readers import indexed_rows
from convbert_jax.data.readers.sources import open_source
from convbert_jax.interop import conversion
from convbert_jax.serve import __main__ as serve
from convbert_jax.sweeps import cli, runner
from convbert_jax.sweeps.runs import expand
from convbert_jax.training import environment
from convbert_jax.workdir import Workdir
from tests.interop.conftest import make_run  # noqa: F401
from tests.refusals import refused

PAYLOAD = "evil.payload:Mixer"
OWN = "evil.own:Mine"
TINY = "--config=configs/tiny.py"
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _nothing_allowed(monkeypatch):
    monkeypatch.setattr(plugins, "_allowed", set())


@pytest.fixture(scope="module")
def run(make_run):  # noqa: F811
    """An untrusted run: random weights, and code that its config will name."""
    folder, _ = make_run()
    (folder / "payload.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('executed').touch()\n"
    )
    own = (REPOSITORY / "tests/models/mean_mixer.py").read_text()
    (folder / "own.py").write_text(
        own.replace('"tests.models.mean_mixer:Mean"', repr(OWN)).replace(
            "class Mean:", "class Mine:"
        )
    )
    return folder


def change(folder: pathlib.Path, **fields) -> None:
    """change(folder, section__field=value) changes the config.json of a run."""
    values = storage.read_json(folder / "config.json", remedy="", fields={})
    for path, value in fields.items():
        section, _, field = path.partition("__")
        if field:
            values[section][field] = value
        else:
            values[section] = value
    (folder / "config.json").write_text(json.dumps(values))


@pytest.fixture
def evil(run, tmp_path, monkeypatch):
    """The untrusted run as ./evil, where Python can import it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configs").symlink_to(REPOSITORY / "configs")
    shutil.copytree(run, tmp_path / "evil")
    change(tmp_path / "evil", model__mixer=PAYLOAD)
    mixers._find.cache_clear()
    yield tmp_path / "evil"
    for name in [name for name in sys.modules if name.partition(".")[0] == "evil"]:
        del sys.modules[name]


def start(*arguments) -> None:
    """Runs the main program with these arguments."""
    with flagsaver.flagsaver():
        main.main(main._read_command_line(["main.py", *arguments]))


# Every mode, and every flag and field that takes a folder.
COMMANDS = {
    "train": ("--workdir=evil",),
    "json": ("--config=evil/config.json", "--workdir=new"),
    "help": ("--workdir=evil", "--help"),
    "show": ("--mode=show", "--workdir=evil"),
    "plan": ("--mode=plan", "--topology=cpu", "--workdir=evil"),
    "doctor": ("--mode=doctor", "--workdir=evil"),
    "prepare": ("--mode=prepare", "--workdir=evil"),
    "eval": ("--mode=eval", "--workdir=evil"),
    "eval of a config": ("--mode=eval", TINY, "--workdir=evil"),
    "verify_resume": ("--mode=verify_resume", "--workdir=evil"),
    "export": ("--mode=export", "--workdir=evil"),
    "export of a source": ("--mode=export", "--source=evil", "--output=out"),
    "import": ("--mode=import", TINY, "--source=evil", "--workdir=new"),
    "predict": ("--mode=predict", "--workdir=evil"),
    "inspect": ("--mode=inspect", "--workdir=evil"),
    "inspect of a source": ("--mode=inspect", "--source=evil", "--output=out"),
    "inspect beside": ("--mode=inspect", "--source=good", "--beside=evil", "--output=out",
                       "--input=texts"),
    "init_from": (TINY, "--config.init_from=evil", "--workdir=new"),
    "init_from of pairs": ("--config=text_to_text:tiny", "--config.init_from=evil",
                           "--workdir=new", "--config.parallel.source=tsv:texts"),
    "fine-tuning": ("--config=text:own", "--config.init_from=evil", "--workdir=new",
                    "--config.task.train=texts"),
    "distill_from": ("--config=text:own", "--config.init_from=good", "--workdir=new",
                     "--config.task.train=texts", "--config.finetune.distill_from=evil"),
    "teacher": (TINY, "--config.distillation.teacher=evil", "--workdir=new",
                "--config.distillation.logits_weight=1"),
}  # fmt: skip
WIDE = {"model__embedding_size": 32, "model__position_embedding": "sinusoidal"}
CALLS = {
    "load": lambda: convbert_jax.load("evil"),
    "load_config": lambda: convbert_jax.load_config("evil/config.json"),
    "pretrain": lambda: convbert_jax.pretrain(workdir="evil"),
    "init_from": lambda: convbert_jax.pretrain("tiny", "new", init_from="evil"),
    "finetune": lambda: convbert_jax.finetune(
        "text:own", "new", init_from="evil", task={"train": "texts"}
    ),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_mode_executes_what_a_folder_names(command, run, evil, tmp_path, capfd):
    shutil.copytree(run, tmp_path / "good")
    (tmp_path / "texts").write_text("text\tlabel\na\t0\nb\t1\n" * 8)
    change(evil, **{"recipe": "translation", **WIDE} if command == "init_from of pairs" else {})
    with pytest.raises(SystemExit) as error:
        start(*COMMANDS[command])
    assert error.value.code in (1, 2)
    said = capfd.readouterr().err
    assert not (evil / "executed").exists()
    if command != "distill_from":  # rejected earlier: the run has no task head
        assert f"{PAYLOAD} names Python" in said
        assert f"--plugins={PAYLOAD}" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("call", CALLS)
def test_no_function_executes_what_a_folder_names(call, evil, tmp_path):
    (tmp_path / "texts").write_text("text\tlabel\na\t0\nb\t1\n" * 8)
    with refused(UserError, PAYLOAD):
        CALLS[call]()
    assert not (evil / "executed").exists()


@pytest.mark.parametrize(
    "fields",
    [
        {"model__stages": [{"layers": 1, "mixer": PAYLOAD}, {"layers": 1}]},
        {"sequence__decoder_mixer": PAYLOAD, "recipe": "translation", **WIDE},
        {"model__mixer": PAYLOAD, "recipe": "finetune"},
        {"model__mixer": PAYLOAD, "recipe": "causal_lm", **WIDE},
    ],
)
def test_no_field_is_executed(fields, evil):
    change(evil, model__mixer="attention")
    change(evil, **fields)
    for call in (CALLS["load"], CALLS["load_config"], lambda: start("--workdir=evil")):
        with pytest.raises((PluginError, SystemExit)):
            call()
    assert not (evil / "executed").exists()


@pytest.mark.parametrize("command", ["train", "show", "plan"])
def test_an_optimizer_that_a_folder_names_is_not_executed(command, evil, capfd):
    change(evil, model__mixer="mixed", optimizer__method="evil.payload:make")
    with pytest.raises((SystemExit, PluginError)):
        start(*COMMANDS[command])
    assert not (evil / "executed").exists()
    assert "--plugins=evil.payload:make" in capfd.readouterr().err
    assert convbert_jax.load("evil").encode(["a"]).shape == (1, 32)  # needs no optimizer
    assert not (evil / "executed").exists()


def test_code_in_a_hugging_face_folder_is_not_executed(run, evil, tmp_path):
    conversion.export(run, output=tmp_path / "hf")
    shutil.copy(run / "payload.py", tmp_path / "hf" / "payload.py")
    kept = json.loads((tmp_path / "hf" / "config.json").read_text())
    names = {"AutoModel": "payload.Model", "AutoConfig": "payload.Config"}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(kept | {"auto_map": names}))
    assert convbert_jax.load("hf").encode(["a"]).shape == (1, 32)
    assert not (tmp_path / "hf" / "executed").exists()


def test_the_server_executes_nothing(evil, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["serve", "--workdir=evil", "--port=0"])
    with pytest.raises(SystemExit):
        serve.main()
    assert PAYLOAD in capfd.readouterr().err
    assert not (evil / "executed").exists()


def test_a_sweep_executes_what_its_own_command_names_alone(evil, tmp_path):
    """Sweep runs are processes that get the permission on their command lines."""
    flags = ("sweep.py", "--config=sweep.py", "--workdir=sweep")
    table = (
        "from convbert_jax.sweeps import Sweep, Variant\n\ndef get_sweep():\n"
        "    return Sweep('tiny', {{'mine': Variant({{{}}})}}, seeds=(0,))\n"
    )
    (tmp_path / "sweep.py").write_text(table.format("'init_from': 'evil'"))
    request = cli.read(flags)
    (run,) = expand(request.sweep, request.folder)
    assert not any("--plugins" in flag for flag in runner.command(run, request.folder))
    with pytest.raises(SystemExit):
        start(*runner.command(run, request.folder))
    assert not (evil / "executed").exists()
    (tmp_path / "sweep.py").write_text(table.format(f"'model.mixer': '{OWN}'"))
    request = cli.read(flags)
    (run,) = expand(request.sweep, request.folder)
    assert f"--plugins={OWN}" in runner.command(run, request.folder)
    assert f"--plugins={OWN}" in cli.read((*flags, f"--plugins={OWN}")).arguments


@pytest.mark.parametrize(
    "named",
    [
        (f"--plugins={OWN}",),
        (f"--plugins=a.b:C,{OWN}",),
        (f"--config.model.mixer={OWN}",),
        (f'--config.model.stages=[{{"layers":1}},{{"layers":1,"mixer":"{OWN}"}}]',),
    ],
)
def test_what_the_command_line_names_is_used(named, evil, tmp_path, capfd):
    change(evil, model__mixer=OWN)
    with pytest.raises(SystemExit):
        start("--mode=predict", "--workdir=evil", *named)
    said = capfd.readouterr().err
    assert "names Python" not in said
    assert "evil.own" in sys.modules, said


def test_processes_that_a_mode_starts_get_the_permission(evil):
    with flagsaver.flagsaver():
        request = main._read_command_line(["main.py", TINY, f"--plugins={OWN}"])
    assert f"--plugins={OWN}" in request.config_flags  # --mode=verify_resume passes it on


def test_what_a_config_file_in_python_names_is_used(evil, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from configs import tiny\n\ndef get_config():\n    config = tiny.get_config()\n"
        f"    config.model.mixer = '{OWN}'\n    return config\n"
    )
    found = convbert_jax.load_config("mine.py")
    assert type(found.encoder.stages[0].layer.mixer).__name__ == "Mine"
    with pytest.raises(PluginError):
        plugins.check_allowed(PAYLOAD, "config.model.mixer")


@pytest.mark.parametrize("how", ["dict", "Config", "changed", "trusted"])
def test_what_the_caller_names_is_used(how, evil):
    change(evil, model__mixer=OWN)
    values = {"model": {"mixer": OWN}}
    if how == "dict":
        found = convbert_jax.load_config(values)
    elif how == "Config":
        model = dataclasses.replace(Config().model, mixer=OWN)
        found = convbert_jax.load_config(dataclasses.replace(Config(), model=model))
    elif how == "changed":
        found = convbert_jax.load_config("tiny", **{"model.mixer": OWN})
    else:
        found = convbert_jax.load_config("evil/config.json", trust_remote_code=True)
    assert found.encoder.stages[0].layer.mixer.gain == 1.0
    assert convbert_jax.load_config("tiny").model.mixer != OWN
    with pytest.raises(PluginError):  # permission ends with the call
        plugins.check_allowed(PAYLOAD, "config.model.mixer")


def test_a_data_set_of_tfds_cannot_name_a_class(evil, tmp_path):
    folder = tmp_path / "1.0.0"
    folder.mkdir()
    (folder / "dataset_info.json").write_text(json.dumps({"name": "own", "version": "1.0.0"}))
    text = {"type": "evil.payload.Text", "content": {}}
    inside = {"pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict"}
    for features in (
        text,
        {"pythonClassName": "evil.payload.Text", "text": {}},
        {**inside, "featuresDict": {"features": {"text": {"python_class_name": "evil.payload.X"}}}},
        {**inside, "jsonFeature": {"json": json.dumps({"text": text})}},
    ):
        (folder / "features.json").write_text(json.dumps(features))
        with refused(DataError, "features.json", "evil.payload."):
            indexed_rows.open_prepared(str(folder), "train")
    with refused(DataError, "tfds:them:corpus"):
        open_source(Config().data, "tfds:them:corpus")
    assert not (evil / "executed").exists()


# --- compiled programs ---

DEFAULT = Config().train.compile_cache


class Enough(Exception):
    """Ends a run once the folder of compiled programs is known."""


@pytest.fixture
def folders(evil, monkeypatch):
    """Records the compile cache folders that a run requests; its config names another one."""
    change(evil, model__mixer="attention", train__compile_cache="gs://stranger/cache")
    asked = []

    def enable(folder):
        asked.append(folder)
        raise Enough

    monkeypatch.setattr(environment, "enable_compile_cache", enable)
    return asked


@pytest.mark.parametrize(
    "command", ["train", "json", "eval", "predict", "inspect", "inspect of a source"]
)
def test_no_mode_reads_compiled_programs_of_a_stranger(command, folders):
    for flags, expected in (((), DEFAULT), (("--config.train.compile_cache=mine",), "mine")):
        with pytest.raises(Enough):
            start(*COMMANDS[command], *flags)
        assert folders.pop() == expected


@pytest.mark.parametrize("call", [CALLS["load"], CALLS["pretrain"]])
def test_no_function_reads_compiled_programs_of_a_stranger(call, folders):
    with pytest.raises(Enough):
        call()
    assert folders == [DEFAULT]


def test_a_stored_folder_of_compiled_programs_is_ignored(evil, tmp_path):
    """The folder is neither read, compared nor stored."""
    change(evil, model__mixer="attention", train__compile_cache=str(tmp_path / "cache"))
    config = Workdir(evil).read_config()
    assert config.train.compile_cache == DEFAULT
    with Workdir(evil).open(config):
        pass
    kept = storage.read_json(evil / "config.json", remedy="", fields={})
    assert "compile_cache" not in kept["train"]
    assert kept["train"].keys() | {"compile_cache"} == to_dict(config)["train"].keys()
    assert not (tmp_path / "cache").exists()
