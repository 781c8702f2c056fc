"""Parses and validates a command line, before jax is loaded."""

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
from convbert_jax.config import Config, ConfigError, from_config_dict, plugins
from convbert_jax.workdir import Workdir

_HELP = ("--help", "-help", "-h", "--helpshort", "--helpfull")

# Flag -> modes that use it; an error in other modes.
MODES_OF_FLAG = {
    "verify_steps": ("verify_resume",),
    "format": ("export",),
    "quantize": ("export",),
    "push_to_hub": ("export",),
    "topology": ("plan",),
    "largest_batch": ("plan",),
    "compare": ("plan",),
    "price": ("plan",),
    "output": ("eval", "export", "predict", "inspect", "plan"),
    "input": ("predict", "inspect"),
    "input_format": ("predict",),
    "texts": ("predict",),
    "step": ("eval", "export", "inspect"),
    "average": ("eval",),
    "generator": ("export",),
    "source": ("export", "import", "inspect"),
    "beside": ("inspect",),
    "word": ("inspect",),
    "layers": ("inspect",),
    "runner": ("prepare",),
    "runner_options": ("prepare",),
}
# Modes that use the config stored with the weights.
_WITHOUT_CONFIG = ("export", "predict", "inspect")
# Modes that need no --config if --workdir has a run.
_OF_A_RUN = ("train", "show", "plan", "prepare", "eval", "verify_resume")
# Mode without support for several processes -> reason.
_OF_ONE_PROCESS = {
    "plan": "one process compiles for all hosts",
    "prepare": "one machine prepares the data for all; use --runner for several machines",
}
_OF_DECODING = "decoding."  # prefix of field paths
_CACHE = "train.compile_cache"


@dataclasses.dataclass(frozen=True)
class Processes:
    """One of several processes, by explicit flags."""

    coordinator: str  # HOST:PORT
    count: int
    index: int


@dataclasses.dataclass(frozen=True)
class Request:
    """A validated command line.

    Attributes:
      config: None if the mode uses the config stored with the weights, or needs none.
      given: paths of the fields that overrides set, as "train.steps".
      decoding: fields of config.decoding that overrides set, and values; the other fields are taken
        from the config stored with the model.
      config_flags: --config, overrides and plug-ins, for another process with the same config.
      compile_cache: compilation cache folder; never taken from a stored config.
      multihost: whether this is one of several processes that are detected automatically.
      processes: None without --coordinator.
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
    quantize: str | None
    push_to_hub: str | None
    topology: str | None
    largest_batch: bool
    compare: bool
    price: float | None
    output: str | None
    input: str
    input_format: str
    texts: tuple[str, ...]
    step: int | None
    average: int | None
    generator: bool | None
    source: str | None
    beside: str | None
    word: str | None
    layers: tuple[int, ...]
    runner: str | None
    runner_options: tuple[str, ...]


def read(argv: Sequence[str]) -> Request:
    """Reads a command line.

    Args:
      argv: the name of the program, and its arguments.

    Raises:
      UserError: a flag, config or value is invalid; one sentence.
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
        quantize=flags.QUANTIZE.value,
        push_to_hub=flags.PUSH_TO_HUB.value,
        topology=flags.TOPOLOGY.value,
        largest_batch=flags.LARGEST_BATCH.value,
        compare=flags.COMPARE.value,
        price=flags.PRICE.value,
        output=flags.OUTPUT.value,
        input=flags.INPUT.value,
        input_format=flags.INPUT_FORMAT.value,
        texts=tuple(flags.TEXTS.value),
        step=flags.STEP.value,
        average=flags.AVERAGE.value,
        generator=flags.GENERATOR.value,
        source=flags.SOURCE.value,
        beside=flags.BESIDE.value,
        word=flags.WORD.value,
        layers=_read_layers(),
        runner=flags.RUNNER.value,
        runner_options=_read_runner_options(changed),
    )


def describe(argv: Sequence[str]) -> str | None:
    """Returns the text of --help, or None for a command line without --help.

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
    for name, modes in MODES_OF_FLAG.items():
        if absl_flags.FLAGS[name].present and mode not in modes:
            raise ConfigError(
                f"has no effect with --mode={mode}; it is for {' and '.join(modes)}.",
                field=f"--{name}",
            )
    for name in (
        *("config", "workdir", "output", "input", "source", "coordinator"),
        *("beside", "word", "topology", "runner", "push_to_hub"),
    ):
        if absl_flags.FLAGS[name].value == "":
            raise ConfigError("is empty; set a value, or leave the flag out.", field=f"--{name}")
    if flags.PRICE.value is not None and not math.isfinite(flags.PRICE.value):
        raise ConfigError(
            "must be a finite number from 0, as --price=1.2.",
            field="--price",
            value=flags.PRICE.value,
        )
    if flags.QUANTIZE.value and flags.FORMAT.value != "onnx":
        raise ConfigError("needs --format=onnx.", field="--quantize", value=flags.QUANTIZE.value)
    of_weights = mode in ("export", "inspect")
    if of_weights and flags.SOURCE.value and not flags.OUTPUT.value:
        raise ConfigError(
            f"is missing; --mode={mode} with --source needs a folder.", field="--output"
        )
    if of_weights and flags.SOURCE.value:
        for name, flag in (("step", flags.STEP), ("workdir", flags.WORKDIR)):
            if flag.value is not None:
                raise ConfigError(
                    "has no effect with --source; for a run, use --workdir instead of --source.",
                    field=f"--{name}",
                )
    named = flags.SOURCE.value or flags.WORKDIR.value or flags.CONFIG.value
    if of_weights and not named:
        raise ConfigError(
            "needs --workdir (the folder of a run) or --source.", field="--mode", value=mode
        )
    if mode in _OF_ONE_PROCESS and (flags.MULTIHOST.value or flags.COORDINATOR.value):
        raise ConfigError(
            f"and --coordinator have no effect with --mode={mode}: {_OF_ONE_PROCESS[mode]}.",
            field="--multihost",
        )
    if mode == "plan" and not flags.TOPOLOGY.value:
        raise ConfigError(
            "is missing; set it for --mode=plan, as v5e:4x4, gpu:h100x8 or cpu.", field="--topology"
        )
    if mode == "import" and not (flags.SOURCE.value and flags.WORKDIR.value):
        raise ConfigError(
            "needs --source=WEIGHTS and --workdir=FOLDER.", field="--mode", value="import"
        )
    if mode == "predict" and not flags.WORKDIR.value:
        raise ConfigError(
            "needs --workdir=MODEL, a fine-tuned model or the run of a generative model.",
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
        raise ConfigError("has no effect without --word; set the word to plot.", field="--layers")
    return tuple(map(int, texts))


def _read_runner_options(changed: Mapping[str, Any]) -> tuple[str, ...]:
    """Parses --runner_options; also rejects config.data.workers, which a runner does not use."""
    text, runner = flags.RUNNER_OPTIONS.value, flags.RUNNER.value
    if text and not runner:
        raise ConfigError(
            "has no effect without --runner; set the runner.", field="--runner_options"
        )
    if runner and "data.workers" in changed:
        raise ConfigError(
            f"has no effect with --runner={runner}; set the number of workers as an option of the "
            "runner, as --runner_options=--direct_num_workers=4.",
            field="--config.data.workers",
        )
    try:
        options = tuple(shlex.split(text or ""))
    except ValueError as error:
        reason = str(error).lower()
        raise ConfigError(
            f"cannot be parsed: {reason}.", field="--runner_options", value=text
        ) from None
    for option in options:
        if not option.startswith("--") or option.partition("=")[0] == "--runner":
            raise ConfigError(
                f"--runner_options: '{option}' is not supported; write --NAME=VALUE, separated by "
                "spaces, and set the runner with --runner.",
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
            "--coordinator, --processes and --process must be set together; add "
            f"{' and '.join(missing)}.",
            field="--coordinator",
        )
    if flags.MULTIHOST.value:
        raise ConfigError(
            "detects the processes automatically; leave out --coordinator.", field="--multihost"
        )
    if not re.fullmatch(r"\S+:\d{1,5}", coordinator) or int(coordinator.rpartition(":")[2]) > 65535:
        raise ConfigError("must be HOST:PORT.", field="--coordinator", value=coordinator)
    if index >= count:
        raise ConfigError(
            f"must be below --processes={count}; process indices start at 0.",
            field="--process",
            value=index,
        )
    return Processes(coordinator, count, index)


def _find_config() -> str | None:
    """Returns the file to read the config from, or None if the mode needs none."""
    mode, file = flags.MODE.value, flags.CONFIG.value
    if mode in _WITHOUT_CONFIG or (file and mode != "eval"):
        return file
    if mode == "doctor":
        of_run = flags.WORKDIR.value and Workdir(flags.WORKDIR.value).config
        return str(of_run) if of_run and of_run.is_file() else None
    if flags.WORKDIR.value and mode in _OF_A_RUN:
        of_run = Workdir(flags.WORKDIR.value).config
    elif mode == "eval" and file:  # --config only names the run, whose stored config is used
        config = from_config_dict(config_files.load(file), check=False)
        of_run = Workdir(_find_workdir(config)).config
    else:
        of_run = None
    if of_run and of_run.is_file():
        return str(of_run)
    why = f"--workdir={of_run.parent} holds no run ({of_run.name}: no such file)" if of_run else ""
    if mode == "eval":
        message = f"{why or '--workdir is missing'}; set it to the folder of a run."
        raise ConfigError(message, field="--workdir")
    known = ", ".join(config_files.known_files())
    message = f"{why and why + '; '}--config is missing; choose from: {known}."
    raise ConfigError(message, field="--config")


def _check_overrides(changed: Mapping[str, Any], file: str | None) -> None:
    """Rejects overrides if there is no config, or if the mode uses the config of the model.

    In the latter case --config provides only the folder of the run and the platform.
    """
    mode = flags.MODE.value
    if mode == "doctor" and changed and not file:
        raise ConfigError(
            "has no effect without --config; set the config that it overrides.",
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
    if mode == "predict":  # decoding may differ from the config of the model
        used |= {path for path in changed if path.startswith(_OF_DECODING)}
    if idle := [path for path in changed if path not in used]:
        raise ConfigError(
            f"has no effect: --mode={mode} uses the config of the model.",
            field=f"--config.{idle[0]}",
        )


def _check_recipe(config: Config) -> None:
    """Rejects modes that the recipe lacks, and the folder of a single fine-tuned model."""
    mode = flags.MODE.value
    if mode in _WITHOUT_CONFIG:
        return
    if reason := config.spec.refused_modes.get(mode):
        reason = reason.format(source=flags.SOURCE.value)
        raise ConfigError(reason, field="--mode", value=mode)
    if config.spec.data == "task" and config.outputs.task:
        raise ConfigError(
            "is a single fine-tuned model; use the folder of the whole run to resume, or "
            "--mode=predict or export.",
            field="--workdir",
            value=flags.WORKDIR.value,
        )


def _find_workdir(config: Config | None) -> epath.Path | None:
    if not config and not flags.WORKDIR.value:
        return None
    return config_files.choose_workdir(flags.WORKDIR.value, config)
