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

What `python -m convbert_jax.main` does, without its printing and with the same numbers. jax is
imported by the first call, not by `import convbert_jax`. What the caller can mend is a `UserError`
of one sentence. `from convbert_jax import console; console.set_up_logging()` shows the log.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convbert_jax.config.errors import UserError

if TYPE_CHECKING:
    from convbert_jax.config import Config
    from convbert_jax.inference.model import Model
    from convbert_jax.inference.writing.model import TextModel
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
    """Reads a model from anywhere, to apply it to texts on the first device that jax finds.

    Compiled programs are kept for the next start in ~/.cache/convbert_jax/compile or
    JAX_COMPILATION_CACHE_DIR, whatever the config of the run says.

    Args:
      path: folder of a pre-training run; of a fine-tuned model (WORKDIR/TASK/seed-N); of a run of a
        model that writes text, of which a `TextModel` comes back; a Hugging Face folder of
        ConvBERT, ELECTRA or BERT; or a TensorFlow 1 checkpoint, as model.ckpt-1000000.
      step: of a run's checkpoint; default the newest that is whole.
      vocabulary: file of the vocabulary (vocab.txt, tokenizer.json, *.model) of weights that lie
        without it, as the official TensorFlow checkpoints do.
      texts: 1 or 2, what a Hugging Face model for sequences reads, where its folder does not say.
      dtype: "float32" or "bfloat16" of the computation; default config.compute_dtype of a run, else
        bfloat16 but on CPUs.
      average: of a model that writes text, how many newest checkpoints to take the mean of; default
        config.decoding.average of the run.
      trust_remote_code: import the Python that the config of the run names, as a mixer of your
        own. It runs with your rights: set this only for code that you have read.

    Raises:
      UserError: there is nothing of these, it cannot be read, or it names Python outside of
        convbert_jax without `trust_remote_code`.

    >>> model = convbert_jax.load("runs/mine")
    >>> model.encode(["a text", "another"]).shape
    (2, 32)
    >>> convbert_jax.load("runs/pairs", average=2).translate(["a text", "another"], beam=3)
    [..., ...]
    """
    from convbert_jax.config.checks import plugins
    from convbert_jax.inference import loading
    from convbert_jax.training.environment import devices

    path = _spell_path("path", path)
    vocabulary = None if vocabulary is None else _spell_path("vocabulary", vocabulary)
    devices.prepare_platform("any")
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
    """Reads and checks a config.

    Args:
      config: as of --config, "configs/tiny.py", "tiny:paper", a file of your own or a run's
        config.json; or a ConfigDict, a nested dict or a Config to change.
      trust_remote_code: import what a config.json names, see `load`. Mixers that a Python file, a
        dict or `changed` names are the caller's own.
      changed: fields by path, as `**{"train.steps": 50}`, or some of a section, as
        `train={"steps": 50}`; of a config file with fewer steps the intervals are fitted, as on the
        command line.

    Raises:
      UserError: no such file or field, or a config that cannot run.

    >>> config = convbert_jax.load_config("tiny", **{"train.steps": 50})
    >>> config.train.steps, config.optimizer.warmup_steps
    (50, 6)
    """
    from convbert_jax import config_files
    from convbert_jax.config import Config, ConfigError, from_config_dict, to_dict
    from convbert_jax.config.checks import plugins

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
            f"config={config!r} is none; name a config file, as 'tiny' or 'configs/tiny.py:paper', "
            "or give a Config, a ConfigDict or a dict of sections."
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
    """Pre-trains, from where the run in its folder is; what --mode=train does.

    Args:
      config: as `load_config` takes it; None goes on with the run in `workdir`.
      workdir: folder of the run, default runs/<config.name>.
      trust_remote_code: import what the configs of `workdir`, of config.init_from and of the
        teacher name, see `load`.
      changed: as of `load_config`. Fields that are named here stay, where others follow the
        vocabulary of tokenizer.path and the sizes of the weights at init_from.

    Raises:
      UserError: config, data, weights and folder do not fit together, or the run cannot go on.

    >>> run = convbert_jax.pretrain("tiny", "runs/trial", **small, **{"train.steps": 4})
    >>> run.step, run.metrics[-1]["split"]
    (4, 'validation')
    """
    from convbert_jax import recipes
    from convbert_jax.config.checks import plugins

    with plugins.trusting(trust_remote_code):
        config, folder, given = _start(config, workdir, changed)
        if config.recipe == "finetune":
            raise _other_recipe(config, "finetune")
        return recipes.pretrain(config, folder, given)


def finetune(
    config: "Config | Mapping[str, Any] | str | None" = None,
    workdir: str | os.PathLike | None = None,
    *,
    trust_remote_code: bool = False,
    **changed: Any,
) -> "FinetuningResult":
    """Fine-tunes on labelled tasks, going on from what the folder has; what --mode=train does.

    Args:
      config: as `load_config` takes it, "glue:cola" or "text:own" for example; None goes on with
        the run in `workdir`.
      workdir: folder of the run, default runs/<config.name>.
      trust_remote_code: as of `pretrain`.
      changed: as of `pretrain`; `init_from` names the weights.

    Raises:
      UserError: weights, vocabulary, data and config do not fit together.

    >>> fields = {"init_from": "runs/mine", "task.train": "train.csv", "finetune.seeds": 1}
    >>> result = convbert_jax.finetune("text:own", "runs/task", **fields, **quick)
    >>> [task.task for task in result.tasks]
    ['own']
    """
    from convbert_jax import recipes
    from convbert_jax.config.checks import plugins

    with plugins.trusting(trust_remote_code):
        config, folder, given = _start(config, workdir, changed)
        if config.recipe != "finetune":
            raise _other_recipe(config, "pretrain")
        return recipes.finetune(config, folder, given)


def _start(config, workdir, changed: Mapping[str, Any]):
    """(config, folder of the run, paths of the fields that were asked for), and jax told what the
    config says of devices and compiled programs.
    """
    from convbert_jax import config_files
    from convbert_jax.config import ConfigError
    from convbert_jax.training.environment import compilation, devices
    from convbert_jax.workdir import Workdir

    changed = config_files.by_path(changed)
    workdir = None if workdir is None else _spell_path("workdir", workdir)
    if config is None and workdir is None:
        raise ConfigError("neither a config nor the workdir of a run is named; name one of them.")
    if config is None:
        file = Workdir(workdir).config
        if not file.is_file():
            raise ConfigError(f"workdir={workdir} holds no run ({file.name}: no such file).")
        config = str(file)
    config = load_config(config, **changed)
    folder = config_files.choose_workdir(workdir, config)
    devices.prepare_platform(config.platform)
    compilation.enable_compile_cache(config.train.compile_cache)
    return config, folder, frozenset(changed)


def _spell_path(name: str, path: str | os.PathLike) -> str:
    """`path` as text; raises UserError for what is no path."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str):
        raise UserError(f"{name}={path!r} is no path; give it as text or as a pathlib.Path.")
    return text


def _other_recipe(config, function: str) -> UserError:
    from convbert_jax.config import ConfigError

    return ConfigError(
        f"config.recipe={config.recipe} is for convbert_jax.{function}; call that one."
    )
