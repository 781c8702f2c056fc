"""Efficient convolution/attention encoders (ConvBERT and its relatives) in JAX, TPU first.

    import convbert_jax

    run = convbert_jax.pretrain("tiny", workdir="runs/mine")
    run.metrics                                            # records to plot
    model = convbert_jax.load("runs/mine")                 # or a Hugging Face folder, …
    model.encode(["a text", "another"])                    # [2, hidden]
    model.fill_mask("Paris is the [MASK] of France.")
    model.replaced("Paris is the capitol of France.")
    convbert_jax.load("runs/pairs").translate("a text")    # a run of config.recipe=translation
    result = convbert_jax.finetune("text:own", workdir="runs/task", **{"init_from": "runs/mine"})

The functions compute the same results as `python -m convbert_jax.main` but print nothing. jax is
imported by the first call, not by `import convbert_jax`. Errors that the caller can fix are a
`UserError` of one sentence. `from convbert_jax import console; console.set_up_logging()` shows the
log.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convbert_jax.config.errors import UserError

if TYPE_CHECKING:
    from convbert_jax.config import Config
    from convbert_jax.inference.model import Model, TextModel
    from convbert_jax.recipes import FinetuningResult, PretrainingResult

__all__ = ["UserError", "finetune", "load", "load_config", "pretrain"]
__version__ = "0.1.0"


def load(
    path: str | os.PathLike,
    *,
    step: int | None = None,
    vocabulary: str | os.PathLike | None = None,
    texts: int | None = None,
    dtype: str | None = None,
    average: int | None = None,
    trust_remote_code: bool = False,
) -> "Model | TextModel":
    """Loads a model for inference on the first device of jax.

    Compiled programs are cached in ~/.cache/convbert_jax/compile or JAX_COMPILATION_CACHE_DIR,
    regardless of the config of the run.

    Args:
      path: folder of a pre-training run, a fine-tuned model (WORKDIR/TASK/seed-N) or a generative
        run (returns a `TextModel`); a Hugging Face folder of ConvBERT, ELECTRA or BERT; or a
        TensorFlow 1 checkpoint, as model.ckpt-1000000.
      step: step of a run's checkpoint; default the newest complete one.
      vocabulary: vocabulary file (vocab.txt, tokenizer.json, *.model) for weights without one, as
        the official TensorFlow checkpoints.
      texts: 1 or 2, the number of texts per example of a Hugging Face sequence model whose folder
        does not specify it.
      dtype: compute dtype, "float32" or "bfloat16"; default config.compute_dtype of a run, else
        bfloat16 on accelerators and float32 on CPUs.
      average: number of newest checkpoints of a run to average; default 1, for generative models
        config.decoding.average of the run.
      trust_remote_code: import custom Python code that the config of the run names, as a mixer. It
        runs with your permissions: set this only for code that you have reviewed.

    Raises:
      UserError: the path is none of these or cannot be read, or its config names Python code
        outside of convbert_jax without `trust_remote_code`.

    >>> model = convbert_jax.load("runs/mine")
    >>> model.encode(["a text", "another"]).shape
    (2, 32)
    >>> convbert_jax.load("runs/pairs", average=2).translate(["a text", "another"], beam=3)
    [..., ...]
    """
    from convbert_jax.config import plugins
    from convbert_jax.inference import loading
    from convbert_jax.training import environment

    path = _spell_path("path", path)
    vocabulary = None if vocabulary is None else _spell_path("vocabulary", vocabulary)
    environment.prepare_platform("any")
    with plugins.trusting(trust_remote_code):
        return loading.load(
            path,
            step=step,
            vocabulary=vocabulary,
            texts=texts,
            dtype=dtype,
            average=average,
        )


def load_config(
    config: "Config | Mapping[str, Any] | str",
    /,
    *,
    trust_remote_code: bool = False,
    **changed: Any,
) -> "Config":
    """Reads and validates a config.

    Args:
      config: a value of --config ("configs/tiny.py", "tiny:paper", your own file or a run's
        config.json), a ConfigDict, a nested dict or a Config.
      trust_remote_code: import code that a config.json names, see `load`. Not needed for names in a
        Python file, a dict or `changed`.
      changed: overrides by path, as `**{"train.steps": 50}`, or by section, as
        `train={"steps": 50}`. With fewer steps than in the config file, warm-up and intervals are
        shortened as on the command line.

    Raises:
      UserError: a file or field does not exist, or the config is invalid.

    >>> config = convbert_jax.load_config("tiny", **{"train.steps": 50})
    >>> config.train.steps, config.optimizer.warmup_steps
    (50, 6)
    """
    from convbert_jax import config_files
    from convbert_jax.config import Config, ConfigError, from_config_dict, plugins, to_dict

    changed = config_files.by_path(changed)
    plugins.allow(plugins.named(changed))
    if isinstance(config, str | os.PathLike):
        with plugins.trusting(trust_remote_code):
            return config_files.make_config(_spell_path("config", config), changed)
    if isinstance(config, Config):
        config = to_dict(config)
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"config={config!r} is not a config; pass a config file, as 'tiny' or "
            "'configs/tiny.py:paper', a Config, a ConfigDict or a dict of sections."
        )
    plugins.allow(plugins.named(values))
    return from_config_dict(config_files.change(values, changed))


def pretrain(
    config: "Config | Mapping[str, Any] | str | None" = None,
    workdir: str | os.PathLike | None = None,
    *,
    trust_remote_code: bool = False,
    **changed: Any,
) -> "PretrainingResult":
    """Starts or resumes pre-training, as --mode=train.

    Args:
      config: as in `load_config`; None resumes the run in `workdir`.
      workdir: folder of the run, default runs/<config.name>.
      trust_remote_code: import code that the configs of `workdir`, config.init_from and the teacher
        name, see `load`.
      changed: as in `load_config`. Fields set here are kept; other fields are adapted to the
        vocabulary of tokenizer.path and the weights of init_from.

    Raises:
      UserError: config, data, weights and folder are incompatible, or the run cannot continue.

    >>> run = convbert_jax.pretrain("tiny", "runs/trial", **small, **{"train.steps": 4})
    >>> run.step, run.metrics[-1]["split"]
    (4, 'validation')
    """
    from convbert_jax import recipes
    from convbert_jax.config import plugins

    with plugins.trusting(trust_remote_code):
        config, folder, given = _start("pretrain", config, workdir, changed)
        return recipes.pretrain(config, folder, given)


def finetune(
    config: "Config | Mapping[str, Any] | str | None" = None,
    workdir: str | os.PathLike | None = None,
    *,
    trust_remote_code: bool = False,
    **changed: Any,
) -> "FinetuningResult":
    """Starts or resumes fine-tuning on labelled tasks, as --mode=train.

    Args:
      config: as in `load_config`, for example "glue:cola" or "text:own"; None resumes the run in
        `workdir`.
      workdir: folder of the run, default runs/<config.name>.
      trust_remote_code: as in `pretrain`.
      changed: as in `pretrain`; `init_from` sets the weights.

    Raises:
      UserError: weights, vocabulary, data and config are incompatible.

    >>> fields = {"init_from": "runs/mine", "task.train": "train.csv", "finetune.seeds": 1}
    >>> result = convbert_jax.finetune("text:own", "runs/task", **fields, **quick)
    >>> [task.task for task in result.tasks]
    ['own']
    """
    from convbert_jax import recipes
    from convbert_jax.config import plugins

    with plugins.trusting(trust_remote_code):
        config, folder, given = _start("finetune", config, workdir, changed)
        return recipes.finetune(config, folder, given)


def _start(function: str, config, workdir, changed: Mapping[str, Any]):
    """Resolves the arguments of a run, and configures jax's platform and compilation cache.

    Args:
      function: the called function, which must fit the recipe.

    Returns:
      The config, the folder of the run, and the paths of the overridden fields.
    """
    from convbert_jax import config_files
    from convbert_jax.config import ConfigError
    from convbert_jax.training import environment
    from convbert_jax.workdir import Workdir

    changed = config_files.by_path(changed)
    workdir = None if workdir is None else _spell_path("workdir", workdir)
    if config is None and workdir is None:
        raise ConfigError("config and workdir are both missing; set one of them.")
    if config is None:
        file = Workdir(workdir).config
        if not file.is_file():
            raise ConfigError(f"workdir={workdir} holds no run ({file.name}: no such file).")
        config = str(file)
    config = load_config(config, **changed)
    if config.spec.function != function:
        raise ConfigError(
            f"config.recipe={config.recipe} is not supported here; call "
            f"convbert_jax.{config.spec.function}."
        )
    folder = config_files.choose_workdir(workdir, config)
    environment.prepare_platform(config.platform)
    environment.enable_compile_cache(config.train.compile_cache)
    return config, folder, frozenset(changed)


def _spell_path(name: str, path: str | os.PathLike) -> str:
    """Converts a path to text; raises UserError if it is not a path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UserError(f"{name}={path!r} is not a path; pass a str or a pathlib.Path.")
    return text
