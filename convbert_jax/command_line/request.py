"""What a command line asks for, checked before jax is loaded."""

import dataclasses
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags as absl_flags
from etils import epath

from convbert_jax import config_files
from convbert_jax.command_line import flags, help_text, overrides
from convbert_jax.config import Config, ConfigError, from_config_dict
from convbert_jax.config.checks import plugins
from convbert_jax.workdir import Workdir

_HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")

# Flags that mean something in some modes only; elsewhere they are a mistake.
_MODES_OF_FLAG = {
    "verify_steps": ("verify_resume",),
    "format": ("export",),
    "topology": ("plan",),
    "largest_batch": ("plan",),
    "compare": ("plan",),
    "price": ("plan",),
    "output": ("eval", "export", "predict", "inspect", "plan"),
    "input": ("predict", "inspect"),
    "input_format": ("predict",),
    "texts": ("predict",),
    "step": ("eval", "export", "inspect"),
    "generator": ("export",),
    "source": ("export", "import", "inspect"),
    "beside": ("inspect",),
    "word": ("inspect",),
    "layers": ("inspect",),
    "runner": ("prepare",),
    "runner_options": ("prepare",),
}
# Modes that go by the config that the weights bring along.
_WITHOUT_CONFIG = ("export", "predict", "inspect")
# Modes that need no --config where --workdir has a run.
_OF_A_RUN = ("train", "show", "plan", "prepare", "eval", "verify_resume")
# Modes of which several processes have no use, and why.
_OF_ONE_PROCESS = {
    "plan": "one process compiles for all hosts",
    "prepare": "one machine prepares for all; several do with --runner, which finds them by itself",
}
_OF_DECODING = "decoding."  # how the paths of such fields begin
_CACHE = "train.compile_cache"


@dataclasses.dataclass(frozen=True)
class Processes:
    """One of several processes, by explicit flags."""

    coordinator: str  # HOST:PORT
    count: int
    index: int


@dataclasses.dataclass(frozen=True)
class Request:
    """What one command line asks for, checked.

    Attributes:
      config: None where the mode goes by what the weights bring along, or needs none.
      given: the fields of the config that an override names, as "train.steps".
      decoding: fields of config.decoding that an override names, and values, of a model that is
        used: it goes by its own config besides.
      config_flags: --config, overrides and plug-ins, for another process with the same config.
      compile_cache: folder of compiled programs, never that of a stored config.
      multihost: whether this is one of several processes that jax finds by itself.
      processes: None if it is not one of several by explicit flags.
    """

    mode: str
    config: Config | None
    workdir: epath.Path | None
    given: frozenset[str]
    decoding: Mapping[str, Any]
    config_flags: tuple[str, ...]
    compile_cache: str
    multihost: bool
    processes: Processes | None
    verify_steps: int
    format: str
    topology: str | None
    largest_batch: bool
    compare: bool
    price: float | None
    output: str | None
    input: str
    input_format: str
    texts: tuple[str, ...]
    step: int | None
    generator: bool | None
    source: str | None
    beside: str | None
    word: str | None
    layers: tuple[int, ...]
    runner: str | None
    runner_options: tuple[str, ...]


def read(argv: Sequence[str]) -> Request:
    """Reads a command line, the program's name first.

    Raises:
      UserError: a flag, a config or a value that cannot be used; one sentence.
    """
    changed = flags.parse(argv)
    _check_flags()
    config_file = _find_config()
    _check_overrides(changed, config_file)
    config = None
    if config_file:
        config = config_files.make_config(config_file, changed)
        _check_recipe(config)
    return Request(
        mode=flags.MODE.value,
        config=config,
        workdir=_find_workdir(config),
        given=frozenset(changed),
        decoding={
            path.removeprefix(_OF_DECODING): value
            for path, value in changed.items()
            if path.startswith(_OF_DECODING)
        },
        config_flags=(
            *(f"--config={config_file}", *overrides.to_flags(changed)),
            *plugins.to_flags(),
        ),
        compile_cache=changed.get(_CACHE, (config or Config()).train.compile_cache),
        multihost=flags.MULTIHOST.value,
        processes=_read_processes(),
        verify_steps=flags.VERIFY_STEPS.value,
        format=flags.FORMAT.value,
        topology=flags.TOPOLOGY.value,
        largest_batch=flags.LARGEST_BATCH.value,
        compare=flags.COMPARE.value,
        price=flags.PRICE.value,
        output=flags.OUTPUT.value,
        input=flags.INPUT.value,
        input_format=flags.INPUT_FORMAT.value,
        texts=tuple(flags.TEXTS.value),
        step=flags.STEP.value,
        generator=flags.GENERATOR.value,
        source=flags.SOURCE.value,
        beside=flags.BESIDE.value,
        word=flags.WORD.value,
        layers=_read_layers(),
        runner=flags.RUNNER.value,
        runner_options=_read_runner_options(changed),
    )


def describe(argv: Sequence[str]) -> str | None:
    """The text that a command line with --help asks for; None for one without.

    Raises:
      UserError: as `read`.
    """
    arguments = [argument for argument in argv if argument not in _HELP]
    if len(arguments) == len(argv):
        return None
    changed = flags.parse(arguments)
    file = flags.CONFIG.value
    if not file and flags.WORKDIR.value:
        of_run = Workdir(flags.WORKDIR.value).config
        file = str(of_run) if of_run.is_file() else None
    if file:
        return help_text.describe_config(config_files.make_config(file, changed), file)
    return help_text.describe_program(flags.MODES, flags.own_flags(), config_files.known_files())


def _check_flags() -> None:
    mode = flags.MODE.value
    for name, modes in _MODES_OF_FLAG.items():
        if absl_flags.FLAGS[name].present and mode not in modes:
            raise ConfigError(
                f"has no effect with --mode={mode}; it is for {' and '.join(modes)}.",
                field=f"--{name}",
            )
    for name in (
        *("config", "workdir", "output", "input", "source", "coordinator"),
        *("beside", "word", "topology", "runner"),
    ):
        if absl_flags.FLAGS[name].value == "":
            raise ConfigError("is empty; name one, or leave the flag out.", field=f"--{name}")
    if flags.PRICE.value is not None and not math.isfinite(flags.PRICE.value):
        raise ConfigError(
            "must be a number from 0, as --price=1.2.", field="--price", value=flags.PRICE.value
        )
    of_weights = mode in ("export", "inspect")
    if of_weights and flags.SOURCE.value and not flags.OUTPUT.value:
        raise ConfigError(
            f"is missing; --mode={mode} with --source needs a folder.", field="--output"
        )
    if of_weights and flags.SOURCE.value:
        for name, flag in (("step", flags.STEP), ("workdir", flags.WORKDIR)):
            if flag.value is not None:
                raise ConfigError(
                    "has no effect with --source; name a run with --workdir instead of --source.",
                    field=f"--{name}",
                )
    named = flags.SOURCE.value or flags.WORKDIR.value or flags.CONFIG.value
    if of_weights and not named:
        raise ConfigError(
            "needs --workdir, the folder of a run, or --source.", field="--mode", value=mode
        )
    if mode in _OF_ONE_PROCESS and (flags.MULTIHOST.value or flags.COORDINATOR.value):
        raise ConfigError(
            f"and --coordinator have no effect with --mode={mode}: {_OF_ONE_PROCESS[mode]}.",
            field="--multihost",
        )
    if mode == "plan" and not flags.TOPOLOGY.value:
        raise ConfigError(
            "is missing; --mode=plan needs one, as v5e:4x4, gpu:h100x8 or cpu.", field="--topology"
        )
    if mode == "import" and not (flags.SOURCE.value and flags.WORKDIR.value):
        raise ConfigError(
            "needs --source=WEIGHTS and --workdir=FOLDER.", field="--mode", value="import"
        )
    if mode == "predict" and not flags.WORKDIR.value:
        raise ConfigError(
            "needs --workdir=MODEL, a fine-tuned model or a run of one that writes text.",
            field="--mode",
            value="predict",
        )


def _read_layers() -> tuple[int, ...]:
    texts = flags.LAYERS.value
    if wrong := [text for text in texts if not re.fullmatch(r"\d+", text)]:
        raise ConfigError(
            "must be whole numbers from 0, as 0,5,11.", field="--layers", value=wrong[0]
        )
    if texts and not flags.WORD.value:
        raise ConfigError(
            "has no effect without --word, whose filters it chooses.", field="--layers"
        )
    return tuple(map(int, texts))


def _read_runner_options(changed: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuses too the field that says how many processes of this machine, where it says nothing."""
    text, runner = flags.RUNNER_OPTIONS.value, flags.RUNNER.value
    if text and not runner:
        raise ConfigError(
            "has no effect without --runner, whose options it has.", field="--runner_options"
        )
    if runner and "data.workers" in changed:
        raise ConfigError(
            f"has no effect with --runner={runner}; how many there are is an option of "
            "its own, as --runner_options=--direct_num_workers=4.",
            field="--config.data.workers",
        )
    try:
        options = tuple(shlex.split(text or ""))
    except ValueError as error:
        reason = str(error).lower()
        raise ConfigError(
            f"is not understood: {reason}.", field="--runner_options", value=text
        ) from None
    for option in options:
        if not option.startswith("--") or option.partition("=")[0] == "--runner":
            raise ConfigError(
                f"--runner_options: '{option}' is none; write each as --NAME=VALUE, with a space "
                "between them, and the runner as --runner.",
                field="--runner_options",
            )
    return options


def _read_processes() -> Processes | None:
    coordinator, count, index = (
        flag.value for flag in (flags.COORDINATOR, flags.PROCESSES, flags.PROCESS)
    )
    given = {"--coordinator": coordinator, "--processes": count, "--process": index}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise ConfigError(
            "--coordinator, --processes and --process belong together; add "
            f"{' and '.join(missing)}.",
            field="--coordinator",
        )
    if flags.MULTIHOST.value:
        raise ConfigError(
            "finds the processes by itself; leave out --coordinator.", field="--multihost"
        )
    if not re.fullmatch(r"\S+:\d{1,5}", coordinator) or int(coordinator.rpartition(":")[2]) > 65535:
        raise ConfigError("must be HOST:PORT.", field="--coordinator", value=coordinator)
    if index >= count:
        raise ConfigError(
            f"must be below --processes={count}; the first one is 0.",
            field="--process",
            value=index,
        )
    return Processes(coordinator, count, index)


def _find_config() -> str | None:
    """What to read the config from; None where the mode needs none."""
    mode, file = flags.MODE.value, flags.CONFIG.value
    if mode in _WITHOUT_CONFIG or (file and mode != "eval"):
        return file
    if mode == "doctor":
        of_run = flags.WORKDIR.value and Workdir(flags.WORKDIR.value).config
        return str(of_run) if of_run and of_run.is_file() else None
    if flags.WORKDIR.value and mode in _OF_A_RUN:
        of_run = Workdir(flags.WORKDIR.value).config
    elif mode == "eval" and file:  # names the run; the config is what the run has kept
        config = from_config_dict(config_files.load(file), check=False)
        of_run = Workdir(_find_workdir(config)).config
    else:
        of_run = None
    if of_run and of_run.is_file():
        return str(of_run)
    why = f"--workdir={of_run.parent} holds no run ({of_run.name}: no such file)" if of_run else ""
    if mode == "eval":
        message = f"{why or '--workdir is missing'}; name the folder of a run."
        raise ConfigError(message, field="--workdir")
    known = ", ".join(config_files.known_files())
    message = f"{why and why + '; '}--config is missing; choose one of: {known}."
    raise ConfigError(message, field="--config")


def _check_overrides(changed: Mapping[str, Any], file: str | None) -> None:
    """Refuses overrides where there is no config, or where it is that of the model; a file of
    --config tells at most where a run is, and the platform.
    """
    mode = flags.MODE.value
    if mode == "doctor" and changed and not file:
        raise ConfigError(
            "has no effect without --config; name the config that it is of.",
            field=f"--config.{next(iter(changed))}",
        )
    if mode not in _WITHOUT_CONFIG:
        return
    used = set()
    if flags.CONFIG.value:
        used = {"platform"} if flags.WORKDIR.value or flags.SOURCE.value else {"platform", "name"}
    used |= {path for path in changed if any(plugins.named({path: changed[path]}))}
    if mode != "export":
        used.add(_CACHE)
    if mode == "predict":  # a model that writes text may write otherwise
        used |= {path for path in changed if path.startswith(_OF_DECODING)}
    if idle := [path for path in changed if path not in used]:
        raise ConfigError(
            f"has no effect: --mode={mode} goes by the config of the model.",
            field=f"--config.{idle[0]}",
        )


def _check_recipe(config: Config) -> None:
    """Refuses what only pre-training has, and one fine-tuned model in place of its run."""
    mode = flags.MODE.value
    if config.recipe != "finetune" or mode in _WITHOUT_CONFIG:
        return
    if mode == "import":
        raise ConfigError(
            "makes a pre-training run; fine-tuning starts from the weights as they are: "
            f"--mode=train --config.init_from={flags.SOURCE.value}.",
            field="--mode",
            value="import",
        )
    if mode == "plan":
        raise ConfigError(
            "is for one long run; fine-tuning is many short ones, which take one "
            "machine: --mode=show tells of them.",
            field="--mode",
            value="plan",
        )
    if mode == "eval":
        raise ConfigError(
            "is for pre-training; the scores of a fine-tuning run are in its table.md "
            "and results.jsonl, and --mode=predict answers new text.",
            field="--mode",
            value="eval",
        )
    if mode not in ("train", "show", "doctor", "prepare"):
        raise ConfigError("is for pre-training.", field="--mode", value=mode)
    if config.outputs.task:
        raise ConfigError(
            "is one fine-tuned model; name the folder of the whole run to go on, or "
            "choose --mode=predict or export.",
            field="--workdir",
            value=flags.WORKDIR.value,
        )


def _find_workdir(config: Config | None) -> epath.Path | None:
    if not config and not flags.WORKDIR.value:
        return None
    return config_files.choose_workdir(flags.WORKDIR.value, config)
