"""What to type next, as (what it does, command line) or as flags."""

import shlex
from collections.abc import Iterable

from convbert_jax.config import Config
from convbert_jax.finetuning.tasks import question_answering
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import ConversionError, outline
from convbert_jax.workdir import Workdir

Command = tuple[str, str]
_WRITING = {
    "causal_lm": "Let it go on after each line of new text",
    "span_corruption": "Let it fill in every [MASK] of new text, line by line",
}


def go_on(workdir: Workdir, *flags: str) -> str:
    """The command that goes on with a run."""
    return _main(f"--workdir={_quote(workdir)}", *flags)


def more_steps(step: int) -> str:
    """The flag that makes a run twice as long."""
    return f"--config.train.steps={2 * step}"


def own_text(config: Config) -> str:
    """The flags that make a run learn from other text, elsewhere: not beside the shards that the
    config names, and held out of that text, not of what this run was measured by.
    """
    name, section, source = "data", config.data, "'text:FOLDER/*.txt'"
    if config.reads_pairs:
        name, section, source = "parallel", config.parallel, "parallel:FILE,FILE"
    flags = [f"--config.{name}.source={source}"]
    if section.validation_source:
        flags.append(f"--config.{name}.validation_source=")
    if config.data.directory:
        flags.append("--config.data.directory=")
    return " ".join((*flags, "--workdir=runs/mine"))


def after_pretraining(config: Config, workdir: Workdir, step: int) -> list[Command]:
    """What can be done with a run that is finished."""
    what = "pairs" if config.reads_pairs else "text"
    same = f"--config={_quote(workdir.config)}"
    common = [
        ("Train it for twice as many steps", go_on(workdir, more_steps(step))),
        (f"Train another one on your own {what}", _main(same, own_text(config))),
        ("Measure it again on held-out text", go_on(workdir, "--mode=eval")),
    ]
    start = f"--config.init_from={_quote(workdir)}"
    if config.writes_text:
        lines = ("--mode=predict", "--input=new.txt", "--output=written.txt")
        what = _WRITING.get(config.recipe, "Let it write to new text, a line to each line")
        pairs = ("--config.parallel.source=tsv:train.tsv", "--config.parallel.columns=text,label")
        task = _main("--config=configs/text_to_text.py:tiny,light", start, *pairs)
        taught = [("Teach it a task, from pairs of texts", task)]
        return [
            (what, go_on(workdir, *lines)),
            *(taught if config.recipe == "span_corruption" else []),
            *common,
        ]
    columns = ("train=train.csv", "texts=text", "label=label")
    labelled = ("--config=configs/text.py:own", start, *(f"--config.task.{c}" for c in columns))
    glue = ("--config=configs/glue.py:all", start, "--config.finetune.data=FOLDER")
    return [
        ("Fine-tune it on labelled text of yours", _main(*labelled)),
        ("Predict new text with what comes out of that", _predict("runs/text-own/own/seed-0")),
        ("Fine-tune it on GLUE", _main(*glue)),
        *_export(config, workdir),
        ("See its attention maps and filters", go_on(workdir, "--mode=inspect")),
        *common,
    ]


def after_finetuning(task: str, models: Iterable[Workdir]) -> list[Command]:
    """What can be done with the models of a task; nothing where none is kept."""
    model = next((model for model in models if model.holds_run()), None)
    if model is None:
        return []
    answers = task in question_answering.VERSIONS
    return [
        ("Predict new text", _predict(model, "questions.jsonl" if answers else "new.csv")),
        *_export(model.read_config(), model),
    ]


def _export(config: Config, workdir: Workdir) -> list[Command]:
    try:
        conversion.check_expressible({"main": outline(config)["main"]})
    except ConversionError:
        return []
    return [("Export it for transformers", go_on(workdir, "--mode=export"))]


def _predict(model: Workdir | str, file: str = "new.csv") -> str:
    flags = ("--mode=predict", f"--workdir={_quote(model)}", f"--input={file}")
    return _main(*flags, "--output=predictions.jsonl")


def _main(*flags: str) -> str:
    return " ".join(("python -m convbert_jax.main", *flags))


def _quote(path: object) -> str:
    return shlex.quote(str(path))
