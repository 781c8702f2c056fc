"""Commands to run after a run, as (purpose, command line), and their flags."""

import shlex
from collections.abc import Iterable

from convbert_jax.config import Config
from convbert_jax.finetuning import question_answering
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import ConversionError, outline
from convbert_jax.workdir import Workdir

Command = tuple[str, str]
_WRITING = {
    "causal_lm": "Continue each line of a file",
    "span_corruption": "Fill in every [MASK] in the lines of a file",
}


def resume(workdir: Workdir, *flags: str) -> str:
    """Returns the command that resumes a run."""
    return _main(f"--workdir={_quote(workdir)}", *flags)


def more_steps(step: int) -> str:
    """Returns the flag that doubles the number of steps."""
    return f"--config.train.steps={2 * step}"


def own_text(config: Config) -> str:
    """Returns the flags of a new run on other text, which is then prepared and evaluated."""
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
    """Returns the commands for a finished pre-training run."""
    what = "pairs" if config.reads_pairs else "text"
    same = f"--config={_quote(workdir.config)}"
    common = [
        ("Train for twice as many steps", resume(workdir, more_steps(step))),
        (f"Train a new model on your own {what}", _main(same, own_text(config))),
        ("Evaluate on held-out text", resume(workdir, "--mode=eval")),
    ]
    start = f"--config.init_from={_quote(workdir)}"
    if config.writes_text:
        lines = ("--mode=predict", "--input=new.txt", "--output=written.txt")
        what = _WRITING.get(config.recipe, "Generate a text for each line of a file")
        pairs = ("--config.parallel.source=tsv:train.tsv", "--config.parallel.columns=text,label")
        task = _main("--config=configs/text_to_text.py:tiny,light", start, *pairs)
        taught = [("Fine-tune on pairs of texts", task)]
        return [
            (what, resume(workdir, *lines)),
            *(taught if config.recipe == "span_corruption" else []),
            *common,
        ]
    columns = ("train=train.csv", "texts=text", "label=label")
    labelled = ("--config=configs/text.py:own", start, *(f"--config.task.{c}" for c in columns))
    glue = ("--config=configs/glue.py:all", start, "--config.finetune.data=FOLDER")
    return [
        ("Fine-tune on your own labeled text", _main(*labelled)),
        ("Predict new text with the fine-tuned model", _predict("runs/text-own/own/seed-0")),
        ("Fine-tune on GLUE", _main(*glue)),
        *_export(config, workdir),
        ("Draw attention maps and filters", resume(workdir, "--mode=inspect")),
        *common,
    ]


def after_finetuning(task: str, models: Iterable[Workdir]) -> list[Command]:
    """Returns the commands for the models of a task; none if no model was kept."""
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
    return [("Export for transformers", resume(workdir, "--mode=export"))]


def _predict(model: Workdir | str, file: str = "new.csv") -> str:
    flags = ("--mode=predict", f"--workdir={_quote(model)}", f"--input={file}")
    return _main(*flags, "--output=predictions.jsonl")


def _main(*flags: str) -> str:
    return " ".join(("python -m convbert_jax.main", *flags))


def _quote(path: object) -> str:
    return shlex.quote(str(path))
