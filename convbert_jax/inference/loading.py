"""Loads a run, a fine-tuned model or weights of other libraries (`convbert_jax.load`)."""

import dataclasses

import jax.numpy as jnp

from convbert_jax.config import Config
from convbert_jax.data.errors import shorten
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.inference import finetuned
from convbert_jax.inference.model import Model, ModelError
from convbert_jax.inference.writing.model import TextModel
from convbert_jax.inference.writing.reading import change_decoding
from convbert_jax.interop import matching, sources
from convbert_jax.interop.networks import split
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.training.environment import compilation, devices
from convbert_jax.workdir import Workdir


def load(
    path: str,
    *,
    step: int | None = None,
    vocabulary: str | None = None,
    texts: int | None = None,
    dtype: str | None = None,
    average: int | None = None,
) -> Model | TextModel:
    """Implements `convbert_jax.load`."""
    if texts not in (None, 1, 2):
        raise ModelError("must be 1 or 2 (texts per row).", field="texts", value=texts)
    workdir = Workdir(path)
    try:
        is_run = workdir.holds_run()
    except OSError as error:  # name too long, permission denied
        raise ModelError(f"{shorten(path)} cannot be read: {error.strerror}.") from None
    if is_run:
        if vocabulary or texts:
            raise ModelError(f"{path} is a run; leave out `vocabulary` and `texts`.", path=path)
        return _load_run(path, workdir, step, dtype, average)
    if average is not None:
        raise ModelError(
            f"is only supported for runs; {path} is not a run.",
            field="average",
            value=average,
            path=path,
        )
    if step is not None:
        raise ModelError(
            f"is only supported for runs; {path} is not a run.",
            field="step",
            value=step,
            path=path,
        )
    finetuned.refuse_several(path)
    return _load_source(path, vocabulary, texts, dtype)


def _load_run(
    path: str, workdir: Workdir, step: int | None, dtype: str | None, average: int | None
) -> Model | TextModel:
    config = matching.for_any_machine(workdir.read_config(), path)
    compilation.enable_compile_cache(Config().train.compile_cache)
    if average is not None and not config.writes_text:
        raise ModelError(
            f"is only supported for generative models; {path} is a run of "
            f"config.recipe='{config.recipe}'. Leave it out.",
            field="average",
            value=average,
            path=path,
        )
    step = workdir.choose_step(step)
    if config.writes_text:
        if average is not None:
            config = change_decoding(config, {"average": average})
        return TextModel(path, config, step, dtype=_choose_dtype(config, dtype))
    step, params = sources.read_params(workdir, config, step)
    is_finetuned = config.recipe == "finetune"
    return Model(
        path,
        config,
        split(config, params),
        read_tokenizer(workdir, config)[0],
        step=step,
        length=config.finetune.length if is_finetuned else config.data.length,
        dtype=_choose_dtype(config, dtype),
        finetuned_params=params if is_finetuned else None,
    )


def _load_source(path: str, vocabulary: str | None, texts: int | None, dtype: str | None) -> Model:
    source = sources.read_source(path)
    if vocabulary:
        section = follow_file(dataclasses.replace(Config().tokenizer, path=vocabulary))
        source = dataclasses.replace(source, tokenizer=dataclasses.asdict(section))
    if source.not_read and not source.tokenizer:
        raise ModelError(
            f"{source.not_read}. To use BERT's tokenization instead, call "
            f"load({path!r}, vocabulary='vocab.txt')."
        )
    if not source.tokenizer:
        raise ModelError(
            f"{path} has no vocabulary. Copy its vocab.txt to this folder, or call "
            f"load({path!r}, vocabulary='vocab.txt').",
            path=path,
        )
    compilation.enable_compile_cache(Config().train.compile_cache)
    config, params, length = Config(), None, source.networks["main"].embeddings.positions
    if finetuned.is_finetuned(source):
        config, params, tokenizer = finetuned.from_source(path, source, texts)
        length = config.finetune.length
    else:
        tokenizer, section = sources.open_vocabulary(path, source)
        config = dataclasses.replace(config, tokenizer=section)
    return Model(
        path,
        config,
        source.networks,
        tokenizer,
        step=source.step,
        length=length,
        dtype=_choose_dtype(config, dtype),
        finetuned_params=params,
    )


def _choose_dtype(config: Config, dtype: str | None) -> jnp.dtype:
    if dtype not in (None, "float32", "bfloat16"):
        raise ModelError("must be 'float32' or 'bfloat16'.", field="dtype", value=dtype)
    device = devices.find_devices(config)[0]
    return devices.compute_dtype(dataclasses.replace(config, compute_dtype=dtype) if dtype else
                                 config, device)  # fmt: skip
