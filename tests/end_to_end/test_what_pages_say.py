"""Commands of README and docs/, run page by page with small models and files.

Files have the names used in the pages. NOT_HERE lists the commands that are not run.
"""

import contextlib
import gzip
import json
import os
import pathlib
import random
import re
import shutil
from collections.abc import Iterator

import pytest
from absl.testing import flagsaver

from convbert_jax import command_line, console, main
from tests.end_to_end.test_command_line import text_source
from tests.test_pages import PAGES, commands, python_files

__all__ = ["text_source"]  # fixture
pytestmark = pytest.mark.slow

# Pattern of a command that is not run -> the reason, and the test that covers it.
NOT_HERE = {
    r"gs://": "a bucket: tests/test_workdir_in_a_bucket.py",
    r"--topology=v": "minutes of the TPU compiler: test_tpu_compile.py",
    r"--multihost": "several hosts: tests/launch/test_local_cluster.py",
    r"DataflowRunner|DirectRunner": "Apache Beam, in an environment of its own: tests/data/units/",
    r"model\.ckpt|joined-dict|lfm2": "foreign weights: tests/interop/",
    r"runs/(wmt|yitu|conv|topics --input)": "foreign weights: tests/interop/",
    r"glue\.py|squad|runs/glue": "data sets: test_finetuning_commands.py, tests/parity/",
    r"launch/sweep\.py(?!.*--plan)": "tables of many runs: tests/sweeps/",
    r"launch/(quickstart|test|local_cluster)\.sh": "minutes: tests/launch/",
    r"verify_resume": "test_command_line.py",
    r"privacy_epsilon": "the package jax-privacy: tests/finetuning/test_privacy.py",
    r"train\.tracker": "packages of trackers: tests/training/test_trackers.py",
    r"convbert_jax\.serve": "it serves until it is stopped: tests/serve/",
    r"convbert_jax\.vectors": "tests/vectors/",
    r"convbert_jax\.minimal_pairs": "tests/inference/test_likelihood.py",
    r"--format=onnx": "PyTorch: tests/interop/huggingface/test_onnx.py",
    r"launch/docs\.py|launch/sweep\.py": "tests/test_pages.py, tests/sweeps/",
    r"benchmarks": "figures: tests/benchmarks/",
}
ORDER = (
    "own_text", "languages", "tokenizer", "modern_encoder", "prepare_data", "beam", "buckets",
    "choose_a_model", "disk_space", "trackers", "continue_training", "budget", "domain_adaptation",
    "phases",
    "glue", "squad", "own_task", "named_entities", "predict", "finetuning_scores",
    "exact_resume", "distill", "look_inside",
    "mixers", "README", "import_weights", "import_fairseq", "export_weights", "translation",
    "own_pairs", "embeddings", "search", "lora", "privacy", "babylm", "export_onnx",
    "text_generation", "score_texts", "pretrain_seq2seq",
    "language_model",
    "own_mixer", "own_optimizer", "check_machine", "plan", "several_devices", "cloud", "gpu",
    "tpu", "out_of_memory", "faq", "file_formats", "corpus_to_classifier",
)  # fmt: skip
MODEL = (
    "model.layers=1", "model.hidden_size=32", "model.embedding_size=32", "model.heads=2",
    "model.ffn_size=64",
)  # fmt: skip
SHORT = (
    "train.steps=2", "train.eval_rows=8", "train.log_every=1", "train.eval_every=2",
    "checkpoint.every=2", "optimizer.warmup_steps=1", "train.compile_cache=",
    "tokenizer.max_unknown_rate=0.5",
)  # fmt: skip
TEXT = ("data.length=32", "data.workers=1", "data.heldout_fraction=0.1", "train.batch_size=8")
WRITING = ("parallel.shapes=1", "parallel.max_length=32", "decoding.average=1")
GENERATIVE_RUNS = {  # read by --mode=predict and eval
    "runs/en-de": (
        "--config=configs/translation.py:tiny,dynamic",
        "--config.parallel.source=parallel:train.en,train.de",
    ),
    "runs/lm": (
        "--config=configs/language_model.py:tiny,light",
        "--config.data.source=text:corpus/a.txt",
    ),
}
FINETUNING = (
    "finetune.epochs=1", "finetune.seeds=1", "finetune.buckets=", "finetune.length=16",
    "finetune.learning_rates=1e-3", "train.compile_cache=",
)  # fmt: skip


def in_small(words: list[str]) -> list[str]:
    """Add fields that make the command fast. The last value of a field wins."""
    line = " ".join(words)
    if "--config=" not in line or re.search("--mode=(show|doctor|plan)", line):
        return words
    if "configs/text.py" in line:
        return [*words, *(f"--config.{field}" for field in FINETUNING)]
    fields = [*SHORT]
    writes = re.search(
        "translation|summarization|span_corruption|text_to_text|language_model|configs/embedding",
        line,
    )
    if "init_from" not in line:
        # The page prints or counts the layers.
        fields += [f for f in MODEL if "layers" not in f or "layers" not in line]
        fields += ["tokenizer.vocab_size=300", "model.kernel_size=3"] if not writes else []
        fields += ["tokenizer.vocab_size=300", "sequence.decoder_layers=1"] if writes else []
    if "parallel.source" not in line:
        fields += TEXT
    if "configs/cramming" in line:  # eight rows on eight devices
        fields.append("train.accumulation=1")
    if "--config=tiny" in line and "data.source" not in line:  # docstrings take a minute
        fields.append("data.source=text:corpus/a.txt")
    if writes:
        fields += WRITING
        fields += ["decoding.beam=2"] if "text_to_text" not in line else []  # which is greedy
    return [*words, *(f"--config.{field}" for field in fields)]


@pytest.fixture(scope="module")
def home(tmp_path_factory, text_source):
    """Folder with the files that the pages use."""
    folder = tmp_path_factory.mktemp("home")
    chosen = random.Random(0)
    text = pathlib.Path(text_source.partition("text:")[2]).read_text()
    words = re.findall("[a-z]+", text.lower())

    def line(number):
        return f"the bank {' '.join(chosen.choices(words, k=number))}."

    def write(name, lines):
        (folder / name).write_text("\n".join(lines) + "\n")

    (folder / "corpus").mkdir()
    paragraphs = "\n\n".join(f"{line(40)} {line(30)}" for _ in range(300))
    (folder / "corpus" / "a.txt").write_text(paragraphs)
    (folder / "wiki").mkdir()
    (folder / "wiki" / "a.txt").write_text("\n\n".join(line(50) for _ in range(100)))
    (folder / "corpus" / "a.txt.gz").write_bytes(gzip.compress(paragraphs.encode()))
    for name, rows in (("train", 120), ("val", 12), ("test", 12)):
        for language in ("en", "de"):
            write(f"{name}.{language}", [line(6) for _ in range(rows)])
        pairs = [{"document": line(12), "summary": line(4)} for _ in range(rows)]
        write(f"{name}.jsonl", map(json.dumps, pairs))
        labelled = [f"{line(2)},{line(6)},{'new' if n % 2 else 'old'}" for n in range(rows)]
        write(f"{name}.csv", ["title,body,topic", *labelled])
        pairs = [f"{line(6)}\t{'new' if n % 2 else 'old'}" for n in range(rows)]
        write("dev.tsv" if name == "val" else f"{name}.tsv", ["text\tlabel", *pairs])
    for name, rows in (("train", 120), ("dev", 12), ("test", 12)):
        sentences = ["the O\nbank B-LOC\n" if n % 2 else "a O\nnew B-ORG\n" for n in range(rows)]
        write(f"{name}.conll", sentences)
    (folder / "corpus.txt").write_text(paragraphs)
    for name, rows in (("authors-train", 120), ("authors-test", 12)):
        passages = [f"{line(8)},{'May' if n % 2 else 'Raabe'}" for n in range(rows)]
        write(f"{name}.csv", ["text,author", *passages])
    write("pairs.csv", ["question,answer", *(f"{line(4)},{line(6)}" for _ in range(120))])
    judged = [f"{line(4)},{line(6)},{'yes' if n % 2 else 'no'}" for n in range(120)]
    write("judged.csv", ["query,document,relevant", *judged])
    (folder / "babylm").mkdir()
    (folder / "babylm" / "a.train.txt").write_text(paragraphs)
    write("new.conll", ["the", "bank"])
    write("new.csv", ["title,body", *(f"{line(2)},{line(5)}" for _ in range(4))])
    write("texts.txt", [f"the {line(8)}" for _ in range(6)])
    return folder


@contextlib.contextmanager
def standard_input(path: pathlib.Path) -> Iterator[None]:
    """Replace descriptor 0, which --input=- reads, by the file."""
    kept = os.dup(0)
    try:
        with open(path, "rb") as file:
            os.dup2(file.fileno(), 0)
        yield
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def start(words: list[str], afresh: bool = False) -> None:
    """Run `python -m convbert_jax.main` in this process; an error fails the test.

    Args:
      words: the flags.
      afresh: remove a run that another page left in the folder.
    """
    with flagsaver.flagsaver(), standard_input(pathlib.Path("texts.txt")):
        request = command_line.read(["main.py", *words])
        if afresh:
            shutil.rmtree(request.workdir, ignore_errors=True)
        main.main(request)


@pytest.mark.parametrize("page", ORDER)
def test_the_commands_of_a_page_run(page, home, monkeypatch):
    monkeypatch.chdir(home)
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # would affect other tests
    monkeypatch.syspath_prepend(home)
    (file,) = (path for path in PAGES if path.stem == page)
    for name, code in python_files(file).items():
        (home / name).write_text(code)
    for words in commands(file):
        line = " ".join(words)
        if any(re.search(pattern, line) for pattern in NOT_HERE):
            continue
        assert words[:3] == ["python", "-m", "convbert_jax.main"], line
        words = [w.replace("FOLDER", "runs/small").replace("OUT", "inside") for w in words[3:]]
        make_what_it_reads(words)
        if output := flag(words, "output"):
            pathlib.Path(output).unlink(missing_ok=True)
        start(in_small(words), afresh="--mode" not in line and "--config=" in line)
        assert not output or pathlib.Path(output).exists(), line


def flag(words: list[str], name: str) -> str | None:
    return next((w.partition("=")[2] for w in words if w.startswith(f"--{name}=")), None)


def make_what_it_reads(words: list[str]) -> None:
    """Train the runs that a command starts from, unless an earlier command did."""
    named = [flag(words, name) for name in ("config.init_from", "config.distillation.teacher")]
    named += [flag(words, name) for name in ("source", "beside")]
    named += [flag(words, "workdir")] if flag(words, "mode") in ("export", "inspect") else []
    for folder in filter(None, named):
        if not pathlib.Path(folder).exists():
            run = ["--config=tiny", f"--workdir={folder}", "--config.data.source=text:corpus/a.txt"]
            run += ["--config.data.directory=shards"]
            run += [word for word in words if word.startswith("--config.recipe=")]  # of a teacher
            start(in_small(run))
    folder = flag(words, "workdir")
    if flag(words, "mode") and folder in GENERATIVE_RUNS and not pathlib.Path(folder).exists():
        start(in_small([*GENERATIVE_RUNS[folder], f"--workdir={folder}"]))


def test_every_page_is_covered():
    """ORDER has every page with a command, and NOT_HERE has no unused pattern."""
    ours = {p.stem for p in PAGES if any("convbert_jax.main" in w for c in commands(p) for w in c)}
    assert ours - set(ORDER) == {"CONTRIBUTING"}  # only verify_resume
    lines = [" ".join(words) for page in PAGES for words in commands(page)]
    for pattern in NOT_HERE:
        assert any(re.search(pattern, line) for line in lines), pattern
