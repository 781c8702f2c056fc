"""All flags of the program, except the fields of a config, see `overrides.py`."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from convbert_jax.command_line import overrides
from convbert_jax.command_line.fields import field_types, nearest
from convbert_jax.config import ConfigError, plugins
from convbert_jax.config.data import INPUT_FORMATS

# Mode -> its description in --help.
MODES = {
    "train": "prepare the data if needed, then start or resume pre-training or fine-tuning",
    "show": "print all fields, and parameters, rows, memory and time of the run; no training",
    "plan": "estimate memory, time and network use on --topology; needs no accelerator",
    "doctor": "check this machine, and with --config the requirements of the run; no training",
    "prepare": "only prepare tokenizer and shards",
    "eval": "evaluate a checkpoint of the pre-training run --workdir on its held-out text",
    "verify_resume": "train twice, once with a kill in the middle, and compare bit for bit",
    "export": "convert a checkpoint of --workdir, or the weights at --source, for other software",
    "import": "create a run in --workdir from the weights at --source",
    "predict": "apply a fine-tuned or generative model in --workdir to each line or row of --input",
    "inspect": "plot attention maps and filters of --workdir, or of the weights at --source",
}
# Environment variable -> its effect.
ENVIRONMENT = {
    "JAX_PLATFORMS": "Platforms that JAX may use: `cpu` leaves out accelerators.",
    "JAX_COMPILATION_CACHE_DIR": "Folder of compiled programs. It takes precedence over "
    "config.train.compile_cache.",
    "JAX_COORDINATOR_ADDRESS": "HOST:PORT of process 0, with --multihost; default detected.",
    "GCE_METADATA_HOST": "Host of the metadata server that announces the preemption of a cloud "
    "machine; without a TPU, the server is asked only if this is set.",
    "HF_TOKEN": "Token of the Hugging Face hub, for --push_to_hub.",
    "HF_HOME": "Cache of Hugging Face, for config.data.source=hub:…",
    "TFDS_DATA_DIR": "Folder of prepared TensorFlow Datasets.",
    "WANDB_PROJECT": "Project of config.train.tracker=wandb; default convbert_jax.",
    "WANDB_NAME": "Name of the run of config.train.tracker=wandb; default config.name.",
    "CONVBERT_API_KEY": "Key that requests to `convbert_jax.serve` must send.",
    "MLFLOW_EXPERIMENT_NAME": "Experiment of config.train.tracker=mlflow; default convbert_jax.",
}
_LONGEST_NAME = 200  # characters of a flag
# Examples in error messages for flags without a default.
_EXAMPLES = {"processes": "4", "process": "0", "step": "1000", "average": "3", "price": "1.2"}
FORMATS = ("huggingface", "tensorflow1", "onnx", "stablehlo")

CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Config file, for example configs/tiny.py, configs/base.py:paper or a run's config.json.",
)
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run; default runs/<config.name>. Without --config, resumes the run in it.",
)
MODE = flags.DEFINE_enum("mode", "train", list(MODES), "What to do.")
MULTIHOST = flags.DEFINE_boolean(
    "multihost",
    False,
    "Run on several hosts and detect the cluster: TPU slice, Slurm or Open MPI.",
)
COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "HOST:PORT of process 0, when the cluster is not detected automatically.",
)
PROCESSES = flags.DEFINE_integer(
    "processes", None, "Number of processes, with --coordinator.", lower_bound=1
)
PROCESS = flags.DEFINE_integer(
    "process", None, "Index of this process, from 0, with --coordinator.", lower_bound=0
)
VERIFY_STEPS = flags.DEFINE_integer(
    "verify_steps", 40, "Steps of each run of --mode=verify_resume.", lower_bound=2
)
FORMAT = flags.DEFINE_enum("format", "huggingface", FORMATS, "Output format of --mode=export.")
QUANTIZE = flags.DEFINE_enum(
    "quantize", None, ("int8",), "For --format=onnx: also write a model with int8 weights."
)
TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "Target of --mode=plan: a TPU slice (v5e:4x4, v5e-16, v5p:4x4x4), gpu:h100x8 or cpu (here).",
)
LARGEST_BATCH = flags.DEFINE_boolean(
    "largest_batch", False, "For --mode=plan: find the largest batch, with up to four more plans."
)
COMPARE = flags.DEFINE_boolean(
    "compare",
    False,
    "For --mode=plan: also plan other meshes, microbatches and config.model.remat.",
)
PRICE = flags.DEFINE_float(
    "price", None, "Price of one chip-hour, for the costs of --mode=plan.", lower_bound=0.0
)
OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "export: new folder; default WORKDIR/FORMAT/step-N. predict: .tsv, .csv or .jsonl file; "
    "default standard output. eval: JSON file; default WORKDIR/evaluation/step-N.json. inspect: "
    "folder; default WORKDIR/inside/step-N. plan: JSON file; default none.",
)
INPUT = flags.DEFINE_string(
    "input",
    "-",
    "predict: file with lines or a table, optionally .gz; default standard input. inspect: file "
    "with one text per line; default held-out texts of the run.",
)
INPUT_FORMAT = flags.DEFINE_enum(
    "input_format",
    "auto",
    INPUT_FORMATS,
    "Format of --input; auto: a table for such a file extension, else lines.",
)
TEXTS = flags.DEFINE_list(
    "texts",
    [],
    "One or two text columns for --mode=predict; default the columns used in training.",
)
STEP = flags.DEFINE_integer(
    "step", None, "Checkpoint for --mode=export, eval, inspect; default the newest.", lower_bound=0
)
AVERAGE = flags.DEFINE_integer(
    "average",
    None,
    "For --mode=eval: evaluate the mean of this many checkpoints; default 1, for generative models "
    "config.decoding.average.",
    lower_bound=1,
)
GENERATOR = flags.DEFINE_boolean(
    "generator",
    None,
    "For --mode=export: include the generator; default: if the format supports it, else print why "
    "not.",
)
PUSH_TO_HUB = flags.DEFINE_string(
    "push_to_hub",
    None,
    "For --mode=export: also upload the folder to OWNER/NAME on the Hugging Face hub; a new "
    "repository is private.",
)
SOURCE = flags.DEFINE_string(
    "source",
    None,
    "For import, export, inspect: a run, a Hugging Face folder or a TensorFlow 1 checkpoint; for "
    "import also a fairseq checkpoint.",
)
PLUGINS = flags.DEFINE_list(
    "plugins",
    [],
    "Custom Python code that a config.json may import: PACKAGE.MODULE:NAME,… Not needed for names "
    "in overrides or in a Python config file.",
)
BESIDE = flags.DEFINE_string(
    "beside", None, "For --mode=inspect: another run, folder or checkpoint to plot next to it."
)
WORD = flags.DEFINE_string(
    "word", None, "For --mode=inspect: plot the filters at all occurrences of this word."
)
LAYERS = flags.DEFINE_list(
    "layers", [], "Layers for --word, from 0; default the first, middle and last."
)
RUNNER = flags.DEFINE_string(
    "runner",
    None,
    "Apache Beam runner for --mode=prepare: DirectRunner, FlinkRunner, DataflowRunner, …; default "
    "processes of this machine.",
)
RUNNER_OPTIONS = flags.DEFINE_string(
    "runner_options",
    None,
    "Options of --runner, as '--direct_num_workers=4 --direct_running_mode=multi_processing'.",
)


def parse(argv: Sequence[str]) -> dict[str, Any]:
    """Sets the flags, and permits the import of plug-ins in flags and overrides.

    Returns:
      The overrides: path of a field -> value.

    Raises:
      ConfigError: an argument is neither a flag nor an override, or has an invalid value.
    """
    changed, arguments = overrides.take(argv[1:])
    for argument in arguments:
        # absl's search for similar names is slow for long ones.
        if len(name := argument.partition("=")[0]) > _LONGEST_NAME:
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
        raise ConfigError("is not supported; flags start with --.", field="argument", value=rest[1])
    plugins.allow((*PLUGINS.value, *plugins.named(changed)))
    return changed


def _wrong_value(message: str) -> ConfigError:
    """Returns the error for an invalid value of a flag.

    Args:
      message: absl's, as "flag --price=abc: could not convert string to float: 'abc'".
    """
    name, value = re.match(r"flag --(\w+)=(.*?): ", message, flags=re.DOTALL).groups()
    flag = flags.FLAGS[name]
    if flag not in own_flags():  # a flag of absl
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
    """Returns the error for a flag that does not exist; it suggests the nearest flag or field."""
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
    """Returns the flags of this module, in the order of their definition."""
    return flags.FLAGS.flags_by_module_dict()[__name__]
