"""report.html: one file without scripts or external resources, rendered by jinja2.

The templates escape every value, so HTML in a corpus, a config or a file name is shown as text.
The page ends with commands to run after the run, as (purpose, command line).
"""

import dataclasses
import datetime
import functools
import platform
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
from absl import logging

import convbert_jax
from convbert_jax import drawing, storage
from convbert_jax.config import Config, changes, to_dict, to_text
from convbert_jax.data.readers.sources import REMOTE
from convbert_jax.finetuning import question_answering
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import ConversionError, outline
from convbert_jax.training import environment as environment_lib
from convbert_jax.workdir import Workdir

Command = tuple[str, str]


def resume_command(workdir: Workdir, *flags: str) -> str:
    """Returns the command that resumes a run."""
    return _main(f"--workdir={_quote(workdir)}", *flags)


def more_steps(step: int) -> str:
    """Returns the flag that doubles the number of steps."""
    return f"--config.train.steps={2 * step}"


def own_text(config: Config) -> str:
    """Returns the flags of a new run on other text, which is then prepared and evaluated."""
    section = config.training_data
    flags = [f"--config.{config.spec.data}.source={config.spec.own_source}"]
    if section.validation_source:
        flags.append(f"--config.{config.spec.data}.validation_source=")
    if config.data.directory:
        flags.append("--config.data.directory=")
    return " ".join((*flags, "--workdir=runs/mine"))


def has_own_text(config: Config) -> bool:
    """Whether a run was trained on files of the user, not on a built-in or public corpus."""
    sources = [section.source for section in config.data.mixture] or [config.training_data.source]
    return any(name.partition(":")[0] not in ("docstrings", *REMOTE) for name in sources)


def after_encoder(config: Config, workdir: Workdir, step: int) -> list[Command]:
    """Returns the commands for a finished pre-training run of an encoder."""
    start = f"--config.init_from={_quote(workdir)}"
    columns = ("train=train.csv", "texts=text", "label=label")
    labelled = ("--config=configs/text.py:own", start, *(f"--config.task.{c}" for c in columns))
    glue = ("--config=configs/glue.py:all", start, "--config.finetune.data=FOLDER")
    return [
        ("Fine-tune on your own labeled text", _main(*labelled)),
        ("Predict new text with the fine-tuned model", _predict("runs/text-own/own/seed-0")),
        ("Fine-tune on GLUE", _main(*glue)),
        *_export(config, workdir),
        ("Draw attention maps and filters", resume_command(workdir, "--mode=inspect")),
        *_after_any(config, workdir, step),
    ]


def after_vectors(config: Config, workdir: Workdir, step: int) -> list[Command]:
    """Returns the commands for a finished run of an encoder that computes vectors."""
    program = f"python -m convbert_jax.vectors {{}} --model={_quote(workdir)} --source=csv:{{}}"
    columns = "--columns=first,second"
    scored = f"{program.format('similarity', 'scored.csv')} {columns} --score_column=score"
    mined = f"{program.format('mine', 'pairs.csv')} {columns} --output=triplets.csv"
    return [
        ("Compare the cosines of pairs with their scores", scored),
        ("Find hard negatives for a second training", mined),
        *_export(config, workdir),
        *_after_any(config, workdir, step),
    ]


def after_generative(config: Config, workdir: Workdir, step: int, purpose: str) -> list[Command]:
    """Returns the commands for a finished run of a generative model.

    Args:
      purpose: what the model does with the lines of a file.
    """
    lines = ("--mode=predict", "--input=new.txt", "--output=written.txt")
    return [(purpose, resume_command(workdir, *lines)), *_after_any(config, workdir, step)]


def finetune_on_pairs(workdir: Workdir) -> Command:
    """Returns the command that fine-tunes an encoder-decoder on pairs of texts."""
    start = f"--config.init_from={_quote(workdir)}"
    pairs = ("--config.parallel.source=tsv:train.tsv", "--config.parallel.columns=text,label")
    task = _main("--config=configs/text_to_text.py:tiny,light", start, *pairs)
    return "Fine-tune on pairs of texts", task


def _after_any(config: Config, workdir: Workdir, step: int) -> list[Command]:
    same = f"--config={_quote(workdir.config)}"
    material = config.spec.material
    own = (f"Train a new model on your own {material}", _main(same, own_text(config)))
    return [
        *longer(config, workdir, step),
        *([] if config.data.mixture else [own]),
        ("Evaluate on held-out text", resume_command(workdir, "--mode=eval")),
    ]


def longer(config: Config, workdir: Workdir, step: int) -> list[Command]:
    """Returns the command that trains on; none for a run with phases, whose lengths are fixed."""
    command = resume_command(workdir, more_steps(step))
    return [] if config.phases else [("Train for twice as many steps", command)]


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
    return [("Export for transformers", resume_command(workdir, "--mode=export"))]


def _predict(model: Workdir | str, file: str = "new.csv") -> str:
    flags = ("--mode=predict", f"--workdir={_quote(model)}", f"--input={file}")
    return _main(*flags, "--output=predictions.jsonl")


def _main(*flags: str) -> str:
    return " ".join(("python -m convbert_jax.main", *flags))


def _quote(path: object) -> str:
    return shlex.quote(str(path))


if TYPE_CHECKING:
    import jinja2

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Control characters, unpaired surrogates and noncharacters, which HTML cannot contain.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


@dataclasses.dataclass(frozen=True)
class About:
    """Facts about a run that every page shows.

    Attributes:
      written: time of the page, in UTC.
      leave_out: sections ("data") and fields ("data.source") of the config that the recipe ignores.
      environment: name -> description of devices and versions.
    """

    written: datetime.datetime
    leave_out: Collection[str]
    environment: Mapping[str, str]


def describe(config: Config, mesh: jax.sharding.Mesh, leave_out: Collection[str]) -> About:
    """Collects the facts about a run that ends now on the devices of `mesh`."""
    found = list(mesh.devices.flat)
    environment = {
        "devices": environment_lib.describe_devices(found),
        "mesh": ", ".join(f"{name} {size}" for name, size in mesh.shape.items()),
        "processes": str(jax.process_count()),
        "compute dtype": str(environment_lib.compute_dtype(config, found[0])),
        "convbert_jax": convbert_jax.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in _LIBRARIES},
    }
    return About(datetime.datetime.now(datetime.UTC), leave_out, environment)


def render(
    template: str, config: Config, about: About, *, state: str, resume: str = "", **values: Any
) -> str:
    """Renders a page.

    Args:
      template: name of a file in templates/.
      state: how far the run came.
      resume: command that resumes an interrupted run; "" if the run is finished.
      values: variables of the template.
    """
    changed, defaults = list_fields(config, about.leave_out)
    return _templates().get_template(template).render(
        config=config,
        about=about,
        state=state,
        resume=resume,
        processes=jax.process_count(),
        changed=changed,
        defaults=defaults,
        **values,
    )  # fmt: skip


def write(workdir: Workdir, make: Callable[[], str]) -> bool:
    """Writes WORKDIR/report.html.

    Any error becomes a warning, because the run itself is finished and saved.

    Args:
      make: returns the page.

    Returns:
      whether the file was written.
    """
    try:
        storage.write_text(workdir.report, make())
    except Exception as error:
        logging.warning(
            "Cannot write %s (%s: %s); the run itself is saved.",
            workdir.report,
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return False
    return True


def list_fields(
    config: Config, leave_out: Collection[str]
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Lists the fields of a config as an override spells them.

    Returns:
      changed: (name, value, default) of fields that differ from the defaults.
      defaults: (name, value) of all others.
    """
    default, own = to_dict(Config()), to_dict(config)
    different = changes.differences(default, own)
    changed, defaults = [], []
    for path, value in {**changes.flatten(own), **different}.items():
        if path in leave_out or path.partition(".")[0] in leave_out:
            continue
        name = f"config.{path}"
        if path in different:
            old, new = different[path]
            changed.append((name, _spell(new), _spell(old)))
        else:
            defaults.append((name, _spell(value)))
    return changed, defaults


def clean(text: str) -> str:
    """Normalizes line ends to newlines and replaces characters that HTML forbids by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def _clean_value(value: Any) -> Any:
    is_plain = isinstance(value, str) and not hasattr(value, "__html__")
    return clean(value) if is_plain else value


@functools.cache
def _templates() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        finalize=_clean_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colors"] = drawing.COLORS
    return environment


def _spell(value: object) -> str:
    return to_text(tuple(value) if isinstance(value, list) else value) or "(empty)"
