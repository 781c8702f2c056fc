"""Starts one run: `python -m convbert_jax.main --config=configs/base.py`.

Modes:
  train          prepare the data if needed, then pre-train or resume; or fine-tune, as the config
                 says (default)
  prepare        only make the tokenizer and the shards
  verify_resume  train twice, once killed in the middle, and compare both bit for bit
  export         write a checkpoint of --workdir, or the weights at --source, for other software
                 (--format, --output)
  import         make --workdir a run from the weights at --source
  predict        apply the fine-tuned model --workdir (or a Hugging Face folder) to each line of
                 --input, into --output

Every field of a config is overridden as --config.section.field=value; `configs/base.py:paper`
selects a variant. The only file with flags; the work is in `recipes/`.
"""

import errno
import pathlib
import sys
from collections.abc import Sequence

from absl import app, flags, logging
from ml_collections import config_flags

from convbert_jax import console, overrides
from convbert_jax.config import Config, ConfigError, UserError, from_config_dict

# Storage that gave out under a run, whichever library was writing.
_STORAGE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_MODES = ("train", "prepare", "verify_resume", "export", "import", "predict")
_FORMATS = ("huggingface", "tensorflow1", "stablehlo")

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, for example configs/tiny.py or configs/base.py:paper."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; default runs/<config.name>.")
_MODE = flags.DEFINE_enum("mode", "train", _MODES, "What to do.")
_MULTIHOST = flags.DEFINE_boolean(
    "multihost",
    False,
    "One of several processes, started on every host: TPU slice, Slurm or Open MPI.",
)
_VERIFY_STEPS = flags.DEFINE_integer(
    "verify_steps", 40, "Steps of each run of --mode=verify_resume."
)
_FORMAT = flags.DEFINE_enum("format", "huggingface", _FORMATS, "What --mode=export writes.")
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Folder that --mode=export makes; default WORKDIR/FORMAT/step-N. File that --mode=predict "
    "makes, .tsv or .jsonl; default standard output.",
)
_INPUT = flags.DEFINE_string(
    "input", "-", "Lines that --mode=predict reads, .gz or not; default standard input."
)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint for --mode=export; default the newest.")
_GENERATOR = flags.DEFINE_boolean("generator", True, "Whether --mode=export takes it along.")
_SOURCE = flags.DEFINE_string(
    "source",
    None,
    "For import and export: a run's folder, a Hugging Face folder or a TensorFlow 1 checkpoint.",
)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    """Flags with every fault as one line and exit code 2."""
    try:
        arguments = overrides.normalize(list(argv[1:]))
        for argument in arguments:
            if argument.startswith("--config="):
                _check_config_file(argument.removeprefix("--config="))
        rest = flags.FLAGS([argv[0], *arguments])
        _check_export_flags()
        if _MODE.value == "import" and not (_SOURCE.value and _WORKDIR.value):
            raise ConfigError("--mode=import needs --source=WEIGHTS and --workdir=FOLDER.")
        if _MODE.value == "predict" and not _WORKDIR.value:
            raise ConfigError("--mode=predict needs --workdir=MODEL, a fine-tuned model.")
        if _CONFIG.value is None and _MODE.value not in ("export", "predict"):
            raise ConfigError(f"--config is missing; choose one of: {', '.join(_config_files())}.")
        if len(rest) > 1:
            raise ConfigError(f"argument '{rest[1]}' is not understood; flags start with --.")
        return rest
    except (UserError, flags.Error) as error:
        console.fail(str(error), code=2)


def _check_export_flags() -> None:
    if _MODE.value != "export":
        return
    if _SOURCE.value and not _OUTPUT.value:
        raise ConfigError("--mode=export with --source needs --output=FOLDER.")
    if not _SOURCE.value and _WORKDIR.value is None and _CONFIG.value is None:
        raise ConfigError("--mode=export needs --workdir, the folder of a run, or --source.")


def _config_files() -> list[str]:
    return sorted(
        str(path)
        for path in pathlib.Path("configs").glob("*.py")
        if "get_config" in path.read_text()
    )


def _check_config_file(value: str) -> None:
    path = pathlib.Path(value.partition(":")[0])
    if not path.is_file():
        known = ", ".join(_config_files()) or "no configs/ here, start from the repository"
        raise ConfigError(f"--config={value}: there is no file {path}; known configs: {known}.")


def _workdir(config: Config | None) -> pathlib.Path:
    value = _WORKDIR.value or f"runs/{config.name}"
    if "://" in value:
        raise ConfigError(
            f"--workdir={value} is a bucket; mount it as a folder (gcsfuse) and give that "
            "folder, so that locks and "
            "renames work."
        )
    return pathlib.Path(value)


def _join_hosts() -> None:
    """Waits for the other processes; jax finds them by what TPU slices, Slurm and Open MPI set."""
    import jax

    try:
        jax.distributed.initialize()
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--multihost: {str(error).splitlines()[0]} Start the same command on every host of a "
            "TPU slice, with srun or with mpirun, or leave --multihost out."
        ) from error
    logging.info("Process %d of %d.", jax.process_index(), jax.process_count())


def main(argv: Sequence[str]) -> None:
    del argv
    console.set_up_logging()
    try:
        # An export goes by the config that the run keeps.
        config = from_config_dict(_CONFIG.value) if _CONFIG.value is not None else None
        workdir = _workdir(config) if config or _WORKDIR.value else None
        if _MULTIHOST.value:
            _join_hosts()
        # Imported late: a wrong flag is answered before jax is loaded.
        from convbert_jax import recipes
        from convbert_jax.interop import conversion, importing

        if _MODE.value == "prepare":
            recipes.prepare(config, workdir)
        elif _MODE.value == "verify_resume":
            from convbert_jax.analysis import verify_resume

            arguments = [
                a for a in sys.argv[1:] if not a.startswith(("--mode", "--workdir", "--verify"))
            ]
            verify_resume.run(arguments, workdir, steps=_VERIFY_STEPS.value)
        elif _MODE.value == "export":
            output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
            options = {"form": _FORMAT.value, "with_generator": _GENERATOR.value}
            if _SOURCE.value:
                conversion.convert(_SOURCE.value, output, **options)
            else:
                conversion.export(workdir, step=_STEP.value, output=output, **options)
        elif _MODE.value == "predict":
            recipes.predict(_WORKDIR.value, _INPUT.value, _OUTPUT.value or "-")
        elif _MODE.value == "import":
            importing.import_run(_SOURCE.value, config, workdir)
        else:
            run = recipes.finetune if config.recipe == "finetune" else recipes.pretrain
            run(config, workdir)
    except UserError as error:
        logging.flush()
        console.fail(str(error))
    except KeyboardInterrupt:  # while training the loop saves first and ends by itself
        console.fail("interrupted; the same command goes on from what is finished.", code=130)
    except OSError as error:
        if error.errno not in _STORAGE_FAULTS:
            raise
        logging.flush()
        console.fail(
            f"{error.filename or 'writing'}: {error.strerror}; free some space or choose another "
            "--workdir, then start again: what was finished is kept."
        )


if __name__ == "__main__":
    app.run(main, flags_parser=_parse_flags)
