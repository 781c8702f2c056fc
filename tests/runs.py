"""One small run of each model family, created once per process.

A pytest plugin registered by tests/conftest.py. Tests that change a run's folder copy it first.
"""

import contextlib
import pathlib
import random
import subprocess
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from convbert_jax.config import Config, fit_to_steps, from_config_dict, to_dict
from convbert_jax.interop.matching import replace
from convbert_jax.training import environment

if TYPE_CHECKING:  # avoids the import in processes that collect other tests
    from convbert_jax import recipes

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
PAIRS = {
    "recipe": "translation",
    "parallel.heldout_fraction": 0.1,
    "parallel.batch_tokens": 512,
    "parallel.shapes": 1,
    "parallel.max_length": 32,
    "decoding.beam": 2,
    "optimizer.learning_rate": 5e-3,
    "optimizer.warmup_steps": 10,
    "model.activation": "relu",
    "model.position_embedding": "sinusoidal",
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
# Toy lexicon: words and their translations.
LEXICON = {
    "Ada": "un",
    "bo": "DO",
    "ce": "tre",
    "di": "qua",
    "ef": "cin",
    "Gu": "sei",
    "ha": "set",
}


def make_config(**fields) -> Config:
    """Returns a validated config of a small model: make_config(section__field=value)."""
    values = {**SMALL, **{name.replace("__", "."): value for name, value in fields.items()}}
    whole = {name: values.pop(name) for name in list(values) if "." not in name}
    return from_config_dict(to_dict(replace(Config(**whole), values)))


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Shows the package one simulated device; programs for one device compile much faster."""
    with pytest.MonkeyPatch.context() as patch:
        find = environment.find_devices
        patch.setattr(environment, "find_devices", lambda config: find(config)[:1])
        yield


def write_pairs(folder: pathlib.Path, name: str, count: int, seed: int = 0) -> str:
    """Writes sentences of one to five words and their translations by `LEXICON`.

    Returns:
      Source of the pairs, "parallel:FILE,FILE".
    """
    rng, sides = random.Random(seed), ([], [])
    for _ in range(count):
        words = rng.choices(sorted(LEXICON), k=rng.randint(1, 5))
        sides[0].append(" ".join(words))
        sides[1].append(" ".join(LEXICON[word] for word in words) + ".")
    paths = [folder / f"{name}.{side}" for side in ("aa", "bb")]
    for path, lines in zip(paths, sides, strict=True):
        path.write_text("".join(line + "\n" for line in lines))
    return f"parallel:{','.join(map(str, paths))}"


def write_task(folder: pathlib.Path) -> None:
    """Writes train.tsv and dev.tsv: sentences that start with "good" (1) or "bad" (0)."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", 24), ("dev", 8)):
        lines = [f"{('bad', 'good')[i % 2]} text {i}\t{i % 2}" for i in range(rows)]
        (folder / f"{name}.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """Source of a few hundred paragraphs from the standard library's modules."""
    paragraphs = []
    for module in (typing, subprocess, pathlib):
        paragraphs += pathlib.Path(module.__file__).read_text().split("\n\n")
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n\n".join(paragraphs))
    return f"text:{file}"


@pytest.fixture(scope="session")
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
    assert fit_to_steps(config, {"train.steps": 4}) == {}  # as on a command line
    return config


@pytest.fixture(scope="session")
def pretrained(pretraining_config, tmp_path_factory) -> "recipes.PretrainingResult":
    """An encoder after four steps with config.recipe=replaced_token."""
    from convbert_jax import recipes

    with one_device():
        return recipes.pretrain(pretraining_config, tmp_path_factory.mktemp("pretrained") / "run")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"), "train", 600)


@pytest.fixture(scope="session")
def translation_config(pairs) -> Config:
    fields = {name.replace(".", "__"): value for name, value in PAIRS.items()}
    return make_config(**fields, parallel__source=pairs)


@pytest.fixture(scope="session")
def translated(translation_config, tmp_path_factory) -> "recipes.PretrainingResult":
    """A translator trained on `LEXICON`, with checkpoints of steps 100, 200 and 300."""
    from convbert_jax import recipes

    with one_device():
        return recipes.pretrain(translation_config, tmp_path_factory.mktemp("translated") / "run")


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def finetuned(finetuning_config, tmp_path_factory) -> "recipes.FinetuningResult":
    """A classifier of one task with two seeds, fine-tuned from `pretrained`."""
    from convbert_jax import recipes

    with one_device():
        return recipes.finetune(finetuning_config, tmp_path_factory.mktemp("finetuned") / "run")
