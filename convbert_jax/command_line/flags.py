"""Every flag of the program. The fields of a config are no flags, see `overrides.py`."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from convbert_jax.command_line import overrides
from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import ConfigError
from convbert_jax.config.checks import plugins
from convbert_jax.config.own_task import INPUT_FORMATS

# What each mode does.
MODES = {
    "train": "prepare the data if needed, then pre-train or fine-tune, from where the run is",
    "show": "every field and what they come to: parameters, rows, memory, time; starts nothing",
    "plan": "what the run would take of --topology: memory, time, network; needs no accelerator",
    "doctor": "check this machine, or with --config all that the run would need; starts nothing",
    "prepare": "only make the tokenizer and the shards",
    "eval": "the numbers of a checkpoint of the pre-training run --workdir on its held-out text",
    "verify_resume": "train twice, once killed in the middle, and compare both bit for bit",
    "export": "write a checkpoint of --workdir, or the weights at --source, for other software",
    "import": "make --workdir a run from the weights at --source",
    "predict": "apply --workdir, fine-tuned or a model that writes, to each line or row of --input",
    "inspect": "draw attention maps and filters of --workdir, or of the weights at --source",
}
# Of what has no default.
_LONGEST_NAME = 200  # characters of a flag
_EXAMPLES = {"processes": "4", "process": "0", "step": "1000", "price": "1.2"}
FORMATS = ("huggingface", "tensorflow1", "stablehlo")

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, for example configs/tiny.py, configs/base.py:paper or a run's config.json.",
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; default runs/<config.name>. Without --config: that of a run, to go on.",
)
MODE = flags.DEFINE_enum("mode", "train", list(MODES), "What to do.")
MULTIHOST = flags.DEFINE_boolean(
    "multihost",
    False,
    "One of several processes, started on every host: TPU slice, Slurm or Open MPI.",
)
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "One of several processes that nothing else counts: HOST:PORT of the first one.",
)
PROCESSES = flags.DEFINE_integer(
    "processes", None, "How many processes --coordinator brings together.", lower_bound=1
)
PROCESS = flags.DEFINE_integer(
    "process", None, "Number of this one, from 0, which is at --coordinator.", lower_bound=0
)
VERIFY_STEPS = flags.DEFINE_integer(
    "verify_steps", 40, "Steps of each run of --mode=verify_resume.", lower_bound=2
)
FORMAT = flags.DEFINE_enum("format", "huggingface", FORMATS, "What --mode=export writes.")
TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "What --mode=plan is for: a TPU slice (v5e:4x4, v5e-16, v5p:4x4x4), gpu:h100x8 or cpu (here).",
)
LARGEST_BATCH = flags.DEFINE_boolean(
    "largest_batch", False, "Whether --mode=plan looks for it, by up to four more plans."
)
COMPARE = flags.DEFINE_boolean(
    "compare",
    False,
    "Whether --mode=plan plans other meshes, microbatches and config.model.remat too.",
)
PRICE = flags.DEFINE_float(
    "price", None, "Of an hour of one chip, for --mode=plan to count with.", lower_bound=0.0
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Folder that --mode=export makes; default WORKDIR/FORMAT/step-N. File that --mode=predict "
    "makes, .tsv, .csv or .jsonl; default standard output. File that --mode=eval makes; default "
    "WORKDIR/evaluation/step-N.json. Folder of --mode=inspect; default WORKDIR/inside/step-N. "
    "JSON file of --mode=plan; default none.",
)
INPUT = flags.DEFINE_string(
    "input",
    "-",
    "Lines or a table that --mode=predict reads, .gz or not; default standard input. A file of a "
    "text a line for --mode=inspect; default held-out texts of the run.",
)
INPUT_FORMAT = flags.DEFINE_enum(
    "input_format",
    "auto",
    INPUT_FORMATS,
    "Of --input; auto goes by the file's name: a table, else lines.",
)
TEXTS = flags.DEFINE_list(
    "texts",
    [],
    "Columns with the one text or the two that --mode=predict reads; default those of training.",
)
STEP = flags.DEFINE_integer(
    "step", None, "Checkpoint for --mode=export, eval, inspect; default the newest.", lower_bound=0
)
GENERATOR = flags.DEFINE_boolean(
    "generator",
    None,
    "Whether --mode=export takes it along; default: where the format can hold it, else it says "
    "why not.",
)
SOURCE = flags.DEFINE_string(
    "source",
    None,
    "For import, export, inspect: a run, a Hugging Face folder, a TensorFlow 1 checkpoint; for "
    "import also one of fairseq.",
)
PLUGINS = flags.DEFINE_list(
    "plugins",
    [],
    "Python of your own that the config of a folder may import: PACKAGE.MODULE:NAME,… What an "
    "override or a config file in Python names needs no flag.",
)
BESIDE = flags.DEFINE_string(
    "beside", None, "Another run, folder or checkpoint, drawn by --mode=inspect beside the first."
)
WORD = flags.DEFINE_string(
    "word", None, "Whose filters --mode=inspect draws, wherever it stands in the texts."
)
LAYERS = flags.DEFINE_list(
    "layers", [], "Whose filters of --word are drawn, from 0; default the first, middle and last."
)
RUNNER = flags.DEFINE_string(
    "runner",
    None,
    "What of Apache Beam does the units of --mode=prepare: DirectRunner, FlinkRunner, "
    "DataflowRunner, …; default processes of this machine.",
)
RUNNER_OPTIONS = flags.DEFINE_string(
    "runner_options",
    None,
    "Of --runner, as '--direct_num_workers=4 --direct_running_mode=multi_processing'.",
)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Sets the flags, permits the import of the plug-ins that they and the overrides name, and
    returns the overrides: path of a field -> value.

    Raises:
      ConfigError: something that is neither, or a value that is none.
    """
    changed, arguments = overrides.take(argv[1:])
    for argument in arguments:
        if len(name := argument.partition("=")[0]) > _LONGEST_NAME:  # absl looks for similar ones
            raise ConfigError("does not exist; --help lists the flags.", field=name)
    try:
        rest = flags.FLAGS([argv[0], *arguments])
    except flags.UnrecognizedFlagError as error:
        raise _unknown(error.flagname) from error
    except flags.IllegalFlagValueError as error:
        raise _wrong_value(str(error)) from error
    except (flags.Error, ValueError) as error:  # ValueError: --nomultihost=5
        raise ConfigError((str(error).splitlines() or ["a flag is wrong"])[0]) from error
    if len(rest) > 1:
        raise ConfigError(
            "is not understood; flags start with --.", field="argument", value=rest[1]
        )
    plugins.allow((*PLUGINS.value, *plugins.named(changed)))
    return changed


def _wrong_value(message: str) -> ConfigError:
    """Returns the error for a value that a flag does not take.

    Args:
      message: of absl, "flag --price=abc: could not convert string to float: 'abc'".
    """
    name, value = re.match(r"flag --(\w+)=(.*?): ", message, flags=re.DOTALL).groups()
    flag = flags.FLAGS[name]
    if flag not in own_flags():  # one of absl itself
        return ConfigError(message.splitlines()[0], field=f"--{name}", value=value)
    if isinstance(flag.parser, flags.EnumParser):
        needs = f"does not exist; choose one of: {', '.join(flag.parser.enum_values)}."
    elif flag.boolean:
        needs = f"must be true or false, as --{name}=true."
    else:
        kind = "whole number" if flag.flag_type() == "int" else "number"
        example = _EXAMPLES.get(name, flag.default)
        needs = f"must be a {kind} from {flag.parser.lower_bound:g}, as --{name}={example}."
    return ConfigError(needs, field=f"--{name}", value=value)


def _unknown(name: str) -> ConfigError:
    """Returns the error for a flag that does not exist; it names the nearest flag or field."""
    types, spelled = field_types(), name.replace("-", "_")
    leaves = {path.rpartition(".")[2] for path in types}
    near = difflib.get_close_matches(spelled, [flag.name for flag in own_flags()], n=1)
    if spelled.rpartition(".")[2] in leaves or not near:
        near = [f"config.{field}" for field in (nearest(spelled, types),) if field]
    hint = f"did you mean --{near[0]}? " if near else ""
    return ConfigError(
        f"does not exist; {hint}--help lists the flags, --config=FILE --help the fields.",
        field=f"--{name}",
    )


def own_flags() -> list[flags.Flag]:
    """Those defined here, in order."""
    return flags.FLAGS.flags_by_module_dict()[__name__]
