"""One small run of each recipe, in this process, for all tests here."""

import pathlib
import random
import subprocess
import typing

import pytest

from convbert_jax import recipes
from convbert_jax.config import Config, fit_to_steps, from_config_dict, to_dict
from convbert_jax.interop.matching import replace
from convbert_jax.training.environment import devices

SMALL = {
    "model.layers": 1,
    "model.mixer": "attention",  # compiles in half the time
    "model.hidden_size": 32,
    "model.embedding_size": 32,
    "model.heads": 2,
    "model.ffn_size": 64,
    "model.positions": 32,
    "data.length": 32,
    "data.workers": 1,
    "data.heldout_fraction": 0.1,
    "tokenizer.vocab_size": 200,
    "train.compile_cache": "",
}


def make_config(**fields) -> Config:
    """make_config(section__field=value): a model that compiles fast, checked as a whole."""
    values = {**SMALL, **{name.replace("__", "."): value for name, value in fields.items()}}
    whole = {name: values.pop(name) for name in list(values) if "." not in name}
    return from_config_dict(to_dict(replace(Config(**whole), values)))


@pytest.fixture(scope="package", autouse=True)
def _one_device():
    """A program for one of the simulated devices compiles several times as fast."""
    with pytest.MonkeyPatch.context() as patch:
        find = devices.find_devices
        patch.setattr(devices, "find_devices", lambda config: find(config)[:1])
        yield


@pytest.fixture(scope="package")
def text(tmp_path_factory) -> str:
    """The standard library's prose is on every machine: a few hundred paragraphs of it."""
    paragraphs = []
    for module in (typing, subprocess, pathlib):
        paragraphs += pathlib.Path(module.__file__).read_text().split("\n\n")
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    return f"text:{file}"


@pytest.fixture(scope="package")
def pretraining_config(text) -> Config:
    config = make_config(
        data__source=text,
        train__steps=4,
        train__batch_size=8,
        train__log_every=2,
        train__eval_every=4,
        train__eval_rows=16,
        optimizer__warmup_steps=1,
        checkpoint__every=4,
    )
    assert fit_to_steps(config, {"train.steps": 4}) == {}  # as a command line would have it
    return config


@pytest.fixture(scope="package")
def pretrained(pretraining_config, tmp_path_factory) -> recipes.PretrainingResult:
    return recipes.pretrain(pretraining_config, tmp_path_factory.mktemp("pretrained") / "run")


PAIRS = {
    "recipe": "translation",
    "parallel.heldout_fraction": 0.1,
    "parallel.batch_tokens": 512,
    "parallel.shapes": 1,
    "parallel.max_length": 32,
    "decoding.beam": 2,
    "optimizer.learning_rate": 5e-3,
    "optimizer.warmup_steps": 10,
    "model.dropout": 0.0,
    "model.attention_dropout": 0.0,
    "train.steps": 300,
    "train.eval_every": 300,
    "train.log_every": 100,
    "train.eval_rows": 24,
    "checkpoint.every": 100,
    "checkpoint.keep": 3,
    "tokenizer.vocab_size": 34,
    "tokenizer.lowercase": True,
}
# What the words of a language that is quickly learned are in another one.
LEXICON = {
    "Ada": "un",
    "bo": "DO",
    "ce": "tre",
    "di": "qua",
    "ef": "cin",
    "Gu": "sei",
    "ha": "set",
}


def write_pairs(folder: pathlib.Path, name: str, count: int, seed: int = 0) -> str:
    """The source `parallel:` of sentences of one to five words, and the same word by word."""
    rng, sides = random.Random(seed), ([], [])
    for _ in range(count):
        words = rng.choices(sorted(LEXICON), k=rng.randint(1, 5))
        sides[0].append(" ".join(words))
        sides[1].append(" ".join(LEXICON[word] for word in words) + ".")
    paths = [folder / f"{name}.{side}" for side in ("aa", "bb")]
    for path, lines in zip(paths, sides, strict=True):
        path.write_text("".join(line + "\n" for line in lines))
    return f"parallel:{','.join(map(str, paths))}"


@pytest.fixture(scope="package")
def pairs(tmp_path_factory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"), "train", 600)


@pytest.fixture(scope="package")
def translation_config(pairs) -> Config:
    fields = {name.replace(".", "__"): value for name, value in PAIRS.items()}
    return make_config(**fields, parallel__source=pairs)


@pytest.fixture(scope="package")
def translated(translation_config, tmp_path_factory) -> recipes.PretrainingResult:
    """A run that has learned LEXICON, with checkpoints of steps 100, 200 and 300."""
    return recipes.pretrain(translation_config, tmp_path_factory.mktemp("translated") / "run")


def write_task(folder: pathlib.Path) -> None:
    """Sentences that start with "good" or "bad"."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", 24), ("dev", 8)):
        lines = [f"{('bad', 'good')[i % 2]} text {i}\t{i % 2}" for i in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")


@pytest.fixture(scope="package")
def finetuning_config(pretrained, tmp_path_factory) -> Config:
    folder = tmp_path_factory.mktemp("task")
    write_task(folder)
    return make_config(
        recipe="finetune",
        name="toy",
        init_from=str(pretrained.folder),
        finetune__tasks=("own",),
        finetune__seeds=2,
        finetune__epochs=(1.0,),
        finetune__length=16,
        finetune__buckets=(),
        finetune__batch_size=8,
        finetune__eval_batch_size=8,
        task__name="mood",
        task__folder=str(folder),
        task__train="train.tsv",
        task__validation="dev.tsv",
    )


@pytest.fixture(scope="package")
def finetuned(finetuning_config, tmp_path_factory) -> recipes.FinetuningResult:
    return recipes.finetune(finetuning_config, tmp_path_factory.mktemp("finetuned") / "run")
