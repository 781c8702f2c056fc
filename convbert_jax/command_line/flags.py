"""Every flag of the program, and what a command line of them asks for."""

import dataclasses
import operator
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags, logging

from convbert_jax.command_line import config_files, overrides
from convbert_jax.config import Config, ConfigError, fit_to_steps, from_config_dict
from convbert_jax.config.own_task import INPUT_FORMATS

# What each mode does.
MODES = {
    "train": "prepare the data if needed, then pre-train or fine-tune, from where the run is",
    "prepare": "only make the tokenizer and the shards",
    "eval": "the numbers of a checkpoint of the pre-training run --workdir on its held-out text",
    "verify_resume": "train twice, once killed in the middle, and compare both bit for bit",
    "export": "write a checkpoint of --workdir, or the weights at --source, for other software",
    "import": "make --workdir a run from the weights at --source",
    "predict": "apply the fine-tuned model --workdir to each line of --input",
}
FORMATS = ("huggingface", "tensorflow1", "stablehlo")

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, for example configs/tiny.py, configs/base.py:paper or a run's config.json.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; default runs/<config.name>. Without --config: that of a run, to go on.",
)
_MODE = flags.DEFINE_enum("mode", "train", list(MODES), "What to do.")
_MULTIHOST = flags.DEFINE_boolean(
    "multihost",
    False,
    "One of several processes, started on every host: TPU slice, Slurm or Open MPI.",
)
_VERIFY_STEPS = flags.DEFINE_integer(
    "verify_steps", 40, "Steps of each run of --mode=verify_resume.", lower_bound=2
)
_FORMAT = flags.DEFINE_enum("format", "huggingface", FORMATS, "What --mode=export writes.")
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Folder that --mode=export makes; default WORKDIR/FORMAT/step-N. File that --mode=predict "
    "makes, .tsv, .csv or .jsonl; default standard output. File that --mode=eval makes; default "
    "WORKDIR/evaluation/step-N.json.",
)
_INPUT = flags.DEFINE_string(
    "input", "-", "Lines or a table that --mode=predict reads, .gz or not; default standard input."
)
_INPUT_FORMAT = flags.DEFINE_enum(
    "input_format",
    "auto",
    INPUT_FORMATS,
    "Of --input; auto goes by the file's name: a table, else lines.",
)
_TEXTS = flags.DEFINE_list(
    "texts",
    [],
    "Columns with the one text or the two that --mode=predict reads; default those of training.",
)
_STEP = flags.DEFINE_integer(
    "step", None, "Checkpoint for --mode=export and eval; default the newest.", lower_bound=0
)
_GENERATOR = flags.DEFINE_boolean("generator", True, "Whether --mode=export takes it along.")
_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "For import and export: a run's folder, a Hugging Face folder or a TensorFlow 1 checkpoint.",
)

# Flags that mean something in some modes only; elsewhere they are a mistake.
_MODES_OF_FLAG = {
    "verify_steps": ("verify_resume",),
    "format": ("export",),
    "output": ("eval", "export", "predict"),
    "input": ("predict",),
    "input_format": ("predict",),
    "texts": ("predict",),
    "step": ("eval", "export"),
    "generator": ("export",),
    "source": ("export", "import"),
}
# Modes that go by the config that the weights bring along.
_WITHOUT_CONFIG = ("export", "predict")
# Modes that need no --config where --workdir has a run.
_OF_A_RUN = ("train", "prepare", "eval", "verify_resume")
_RUN_CONFIG = "config.json"  # in a workdir, see training/workdir.py


@dataclasses.dataclass(frozen=True)
class Request:
    """What one command line asks for, checked.

    Attributes:
      config: None where the mode goes by what the weights bring along.
      given: the fields of the config that an override names, as "train.steps".
      config_flags: --config and overrides, for another process with the same config.
    """

    mode: str
    config: Config | None
    workdir: pathlib.Path | None
    given: frozenset[str]
    config_flags: tuple[str, ...]
    multihost: bool
    verify_steps: int
    format: str
    output: str | None
    input: str
    input_format: str
    texts: tuple[str, ...]
    step: int | None
    generator: bool
    source: str | None


def read(argv: Sequence[str]) -> Request:
    """Reads a command line, the program's name first.

    Raises:
      UserError: a flag, a config or a value that cannot be used; one sentence.
    """
    changed, arguments = overrides.take(argv[1:])
    try:
        rest = flags.FLAGS([argv[0], *arguments])
    except flags.Error as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    if len(rest) > 1:
        raise ConfigError(f"argument '{rest[1]}' is not understood; flags start with --.")
    _check_flags()
    config_file = _find_config()
    config = None
    if config_file:
        config = _make_config(config_file, changed)
        _check_recipe(config)
    elif changed:
        raise ConfigError(
            f"--config.{next(iter(changed))} has no effect: --mode={_MODE.value} goes by the "
            "config of the model."
        )
    return Request(
        mode=_MODE.value,
        config=config,
        workdir=_find_workdir(config),
        given=frozenset(changed),
        config_flags=(f"--config={config_file}", *overrides.to_flags(changed)),
        multihost=_MULTIHOST.value,
        verify_steps=_VERIFY_STEPS.value,
        format=_FORMAT.value,
        output=_OUTPUT.value,
        input=_INPUT.value,
        input_format=_INPUT_FORMAT.value,
        texts=tuple(_TEXTS.value),
        step=_STEP.value,
        generator=_GENERATOR.value,
        source=_SOURCE.value,
    )


def _make_config(file: str, changed: Mapping[str, Any]) -> Config:
    """The config of a file with overrides; a Python file's intervals are fitted to fewer steps."""
    values = config_files.load(file)
    if file.endswith(".json"):  # of a run: it has what was chosen
        config = from_config_dict(overrides.apply(values, changed))
        if "train.steps" in changed and config.recipe != "finetune":
            _tell_intervals(config, file, changed)
        return config
    of_file = from_config_dict(values, check=False)
    fitted = fit_to_steps(of_file, changed)
    config = from_config_dict(overrides.apply(values, {**fitted, **changed}))
    if fitted:
        logging.info(
            "For %s steps, not the %s of %s: %s. Name any of them to choose it.",
            f"{config.train.steps:,}",
            f"{of_file.train.steps:,}",
            file,
            ", ".join(f"config.{path}={value}" for path, value in fitted.items()),
        )
    return config


def _tell_intervals(config: Config, file: str, changed: Mapping[str, Any]) -> None:
    """Those of a trial would be a poor choice for the long run that it becomes."""
    paths = ("optimizer.warmup_steps", "train.log_every", "train.eval_every", "checkpoint.every")
    kept = [
        f"config.{path}={operator.attrgetter(path)(config)}"
        for path in paths
        if path not in changed
    ]
    if kept:
        logging.info(
            "As in %s: %s. Name any of them, or the config file, to change it.",
            file,
            ", ".join(kept),
        )


def _check_flags() -> None:
    mode = _MODE.value
    for name, modes in _MODES_OF_FLAG.items():
        if flags.FLAGS[name].present and mode not in modes:
            raise ConfigError(
                f"--{name} has no effect with --mode={mode}; it is for {' and '.join(modes)}."
            )
    for name in ("config", "workdir", "output", "input", "source"):
        if flags.FLAGS[name].value == "":
            raise ConfigError(f"--{name}= is empty; name one, or leave the flag out.")
    if mode == "export" and _SOURCE.value and not _OUTPUT.value:
        raise ConfigError("--mode=export with --source needs --output=FOLDER.")
    if mode == "export" and not (_SOURCE.value or _WORKDIR.value or _CONFIG.value):
        raise ConfigError("--mode=export needs --workdir, the folder of a run, or --source.")
    if mode == "import" and not (_SOURCE.value and _WORKDIR.value):
        raise ConfigError("--mode=import needs --source=WEIGHTS and --workdir=FOLDER.")
    if mode == "predict" and not _WORKDIR.value:
        raise ConfigError("--mode=predict needs --workdir=MODEL, a fine-tuned model.")


def _find_config() -> str | None:
    """What to read the config from; None where the mode needs none."""
    mode, file = _MODE.value, _CONFIG.value
    if mode in _WITHOUT_CONFIG or (file and mode != "eval"):
        return file
    if _WORKDIR.value and mode in _OF_A_RUN:
        of_run = pathlib.Path(_WORKDIR.value) / _RUN_CONFIG
    elif mode == "eval" and file:  # names the run; the config is what the run has kept
        config = from_config_dict(config_files.load(file), check=False)
        of_run = _find_workdir(config) / _RUN_CONFIG
    else:
        of_run = None
    if of_run and of_run.is_file():
        return str(of_run)
    why = f"--workdir={of_run.parent} holds no run ({_RUN_CONFIG}: no such file)" if of_run else ""
    if mode == "eval":
        raise ConfigError(f"{why or '--workdir is missing'}; name the folder of a run.")
    known = ", ".join(config_files.known_files())
    raise ConfigError(f"{why and why + '; '}--config is missing; choose one of: {known}.")


def _check_recipe(config: Config) -> None:
    """Refuses what only pre-training has, and one fine-tuned model in place of its run."""
    mode = _MODE.value
    if config.recipe != "finetune" or mode == "import":
        return
    if mode == "eval":
        raise ConfigError(
            "--mode=eval is for pre-training; the scores of a fine-tuning run are in its table.md "
            "and results.jsonl, and --mode=predict answers new text."
        )
    if mode != "train":
        raise ConfigError(
            f"--mode={mode} is for pre-training; fine-tuning reads the files of its tasks at its "
            "start."
        )
    if config.outputs.task:
        raise ConfigError(
            f"--workdir={_WORKDIR.value} is one fine-tuned model; name the folder of the whole run "
            "to go on, or choose --mode=predict or export."
        )


def _find_workdir(config: Config | None) -> pathlib.Path | None:
    if not config and not _WORKDIR.value:
        return None
    value = _WORKDIR.value
    if not value:
        if config.name in ("", ".", "..") or "/" in config.name:
            raise ConfigError(
                f"config.name='{config.name}' is no name of a folder, which runs/NAME needs; name "
                "the folder with --workdir."
            )
        value = f"runs/{config.name}"
    if "://" in value:
        raise ConfigError(
            f"--workdir={value} is a bucket; mount it as a folder (gcsfuse) and give that folder, "
            "so that locks and renames work."
        )
    return pathlib.Path(value)
