"""Python API: documentation examples, and the same results as the command line."""

import doctest
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.config import UserError, to_config_dict
from convbert_jax.inference import model as model_module
from tests import runs
from tests.refusals import refused

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
DOCUMENTED = (convbert_jax, model_module)
NOT_NUMBERS = ("seconds", "tokens_per_second", "memory", "mfu")


@pytest.fixture(autouse=True, scope="module")
def _one_device():
    with runs.one_device():
        yield


def without_times(records):
    """Returns a run's metrics without timings."""
    return [
        {n: v for n, v in record.items() if not any(part in n for part in NOT_NUMBERS)}
        for record in records
    ]


def test_the_examples_of_the_documentation(pretrained, translated, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(pretrained.folder)
    (tmp_path / "runs" / "pairs").symlink_to(translated.folder)
    runs.write_task(tmp_path)
    (tmp_path / "train.csv").write_text((tmp_path / "train.tsv").read_text().replace("\t", ","))
    small = {**runs.SMALL, "data.source": text, "train.batch_size": 8, "train.eval_rows": 16}
    names = {
        "convbert_jax": convbert_jax,
        "small": small,
        "quick": {"finetune.length": 16, "finetune.epochs": (1.0,), "train.compile_cache": ""},
        "model": convbert_jax.load(pretrained.folder),
    }
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder()
    examples = [t for m in DOCUMENTED for t in finder.find(m) if t.examples]
    assert len(examples) == 11, [t.name for t in examples]
    for example in examples:
        example.globs = dict(names)
        said = []
        runner.run(example, out=said.append)
        assert not said, "".join(said)


def test_pretraining_is_that_of_the_command_line(pretrained, pretraining_config, tmp_path):
    """A config file, a ConfigDict and changed fields give the same result."""
    values = to_config_dict(pretraining_config).unlock()
    values.train.steps = 2
    found = convbert_jax.pretrain(values, tmp_path / "run", **{"train.steps": 4})
    assert isinstance(found, recipes.PretrainingResult)
    assert without_times(found.metrics) == without_times(pretrained.metrics)
    assert (found.folder, found.step) == (tmp_path / "run", 4)
    again = convbert_jax.pretrain(workdir=tmp_path / "run")
    assert again.metrics == found.metrics
    with refused(UserError, 1, 2, field="config.model.layers"):
        convbert_jax.pretrain(workdir=tmp_path / "run", **{"model.layers": 2})


@pytest.mark.parametrize(
    ("call", "mentions"),
    [
        (lambda: convbert_jax.pretrain("glue:cola"), "convbert_jax.finetune"),
        (lambda: convbert_jax.finetune("tiny"), "convbert_jax.pretrain"),
        (lambda: convbert_jax.pretrain(), "workdir"),
        (lambda: convbert_jax.pretrain(workdir="nowhere"), "workdir=nowhere"),
        (lambda: convbert_jax.load_config("tny"), "configs/base.py"),
        (lambda: convbert_jax.load_config({"modle": {}}), "config.model"),
        (lambda: convbert_jax.load_config(5), "config=5"),
        (lambda: convbert_jax.load_config("tiny", train=5), "config.train"),
        (lambda: convbert_jax.load_config("tiny", train={"stps": 5}), "config.train.steps"),
        (lambda: convbert_jax.pretrain("tiny", 5), "workdir=5"),
        (lambda: convbert_jax.load(None), "path=None"),
        (lambda: convbert_jax.load("nowhere"), "nowhere"),
        (lambda: convbert_jax.load("nowhere", texts=3), "texts=3"),
    ],
)
def test_mistakes_are_one_sentence(call, mentions):
    with refused(UserError, mentions) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_section_that_is_given_keeps_its_other_fields():
    """Other fields of the section keep their values, as with fields given by path."""
    wanted = convbert_jax.load_config("tiny", **{"train.steps": 50, "model.layers": 2})
    section = to_config_dict(wanted).train
    assert wanted.train.batch_size != type(wanted.train)().batch_size
    for train in ({"steps": 50}, {"steps": 50, "batch_size": 32}):
        found = convbert_jax.load_config("tiny", train=train, model={"layers": 2})
        assert found == wanted
    again = convbert_jax.load_config(wanted, train={"steps": 60})
    assert again.train.batch_size == wanted.train.batch_size
    assert convbert_jax.load_config(again, train=section) == wanted


PLATFORM = """
import convbert_jax, jax, os
from convbert_jax import recipes
recipes.pretrain = lambda *_: None
try:
    convbert_jax.load("nowhere")
except convbert_jax.UserError:
    print(os.environ["TPU_WORKER_HOSTNAMES"], jax.config.jax_platforms)
convbert_jax.pretrain("tiny", "run", platform="cpu")
print(jax.config.jax_platforms)
"""


def test_the_platform_is_chosen_before_jax_looks_for_devices(tmp_path):
    left_out = ("JAX_PLATFORMS", "TPU_WORKER_HOSTNAMES", "TPU_ACCELERATOR_TYPE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"TPU_SKIP_MDS_QUERY": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", PLATFORM],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["localhost", "None", "cpu"], done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python of a fresh virtual environment with only `pip install .` of this package.

    Dependencies come from the environment of the tests.
    """
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"  # pip builds inside the source folder
    source.mkdir()
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "requirements.txt"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("convbert_jax", "configs"):
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
    python = folder / "env" / "bin" / "python"
    quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([python, *quiet, "--no-deps", source], check=True)
    shutil.rmtree(source)
    place = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    ours, lent = (
        subprocess.run([p, "-c", place], capture_output=True, text=True, check=True).stdout.strip()
        for p in (python, sys.executable)
    )
    (pathlib.Path(ours) / "lent.pth").write_text(lent)
    return python


NOTEBOOK = """
import convbert_jax, sys
assert "site-packages" in convbert_jax.__file__, convbert_jax.__file__
fields = {"train.steps": 4, "data.source": sys.argv[1], "data.workers": 1, "train.eval_rows": 16,
          "model.layers": 1, "model.hidden_size": 32, "model.embedding_size": 32, "model.heads": 2,
          "model.ffn_size": 64, "tokenizer.vocab_size": 200, "train.batch_size": 8}
config = convbert_jax.load_config("configs/tiny.py", **fields)
run = convbert_jax.pretrain(config, "runs/mine")
assert run.metrics[-1]["step"] == 4, run.metrics
model = convbert_jax.load("runs/mine")
assert model.encode(["a text", "another"]).shape == (2, 32)
assert len(model.fill_mask("Paris is the [MASK] of France.")) == 5
assert model.replaced("Paris is the capitol of France.")[0]["token"]
print("done", run.evaluation["mlm_loss"])
"""


@pytest.mark.slow
def test_a_notebook_and_the_command_line_after_pip_install(installed, text, tmp_path):
    """Runs in a separate folder away from the checkout; both give the same numbers."""
    start = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
    result = subprocess.run([installed, "-c", NOTEBOOK, text], **start)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("done "), result.stdout  # no other output
    flags = ["data.workers=1", "model.layers=1", "model.hidden_size=32", "model.embedding_size=32"]
    flags += ["model.heads=2", "model.ffn_size=64", "tokenizer.vocab_size=200", "train.steps=4"]
    flags += ["train.batch_size=8", "train.eval_rows=16", f"data.source={text}"]
    command = ["-m", "convbert_jax.main", "--config=configs/tiny.py", "--workdir=runs/other"]
    result = subprocess.run([installed, *command, *(f"--config.{f}" for f in flags)], **start)
    assert result.returncode == 0, result.stderr
    ours, theirs = (
        [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").open()]
        for name in ("mine", "other")
    )
    assert without_times(ours) == without_times(theirs)
