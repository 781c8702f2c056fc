"""Predicts rows of a file or pipe with a fine-tuned or generative model (`--mode=predict`)."""

import contextlib
import gzip
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax.numpy as jnp
from absl import logging

from convbert_jax import storage
from convbert_jax.config import Config, ConfigError
from convbert_jax.data import input_rows
from convbert_jax.data.input_rows import ModelInput
from convbert_jax.data.readers.rows import Source, Stream
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference import loading
from convbert_jax.inference import stream as prediction_output
from convbert_jax.inference import stream as prediction_resume
from convbert_jax.inference import stream as prediction_stream
from convbert_jax.inference.generation import Writer, change_decoding, read_mean
from convbert_jax.inference.predictor import Answer, make_predictor
from convbert_jax.interop import matching
from convbert_jax.interop.sources import read_tokenizers
from convbert_jax.recipes.results import PredictionResult
from convbert_jax.storage import expand, replacing, try_lock, unfinished_name
from convbert_jax.training import environment
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir

_PIPE = "-"  # standard input or output


class _Opened(NamedTuple):
    """A loaded model.

    Attributes:
      plain: write the generated texts only, one per line.
    """

    config: Config
    params: Params
    tokenizers: tuple[Tokenizer, ...]
    reads: ModelInput
    answer: Answer
    plain: bool


def predict(
    path: str,
    source: str,
    output: str,
    *,
    input_format: str = "auto",
    texts: Sequence[str] = (),
    decoding: Mapping[str, Any] | None = None,
) -> PredictionResult:
    """Predicts every row of a file, or every line of a pipe as it arrives.

    Args:
      path: model folder, see `finetuned.read_finetuned`, or a run of a generative model.
      source: lines or a table (optionally `.gz`; FILE.json#KEY), "-" for standard input.
      output: new file: .tsv or .csv for a table, else JSON lines, optionally `.gz`; "-" for
        standard output. With a generative model, standard output and .txt get one plain line per
        row. The file appears when all rows are predicted. JSON lines of an interrupted call are
        kept in FILE.unfinished, and the same call resumes after them.
      input_format: one of `config.data.INPUT_FORMATS`.
      texts: columns of the text or text pair; () for the columns of the training data.
      decoding: fields of config.decoding to change, by name, for a generative model.

    Raises:
      UserError: model or file do not exist, `output` exists or is being written by another
        process, or the input has no row that the model can read.
    """
    _check_output(output)
    given = _open_input(source)
    with _alone(output):
        model = _open_model(path, output, texts, decoding or {})
        return _predict(path, model, given, output, input_format)


def _open_model(
    path: str, output: str, texts: Sequence[str], decoding: Mapping[str, Any]
) -> _Opened:
    workdir = Workdir(path)
    if workdir.holds_run():
        config = workdir.read_config()
        if config.spec.generates:
            return _open_writer(workdir, config, output, texts, decoding)
    if decoding:
        raise ConfigError(
            f"--config.decoding.{next(iter(decoding))} has no effect: {path} is not a generative "
            "model. Leave it out.",
            field=f"config.decoding.{next(iter(decoding))}",
            path=path,
        )
    config, params, tokenizer = loading.read_finetuned(path, len(texts) or None)
    reads = input_rows.describe_model_input(config, texts)
    dtype = _choose_dtype(config)
    predictor = make_predictor(config, params, tokenizer, dtype)
    return _Opened(config, params, (tokenizer,), reads, predictor.answer, plain=False)


def _open_writer(
    workdir: Workdir, config: Config, output: str, texts: Sequence[str], decoding: Mapping[str, Any]
) -> _Opened:
    config = change_decoding(matching.for_any_machine(config, str(workdir)), decoding)
    plain = _is_pipe(output) or _ending(output) == ".txt"
    if plain and config.decoding.n_best > 1:
        raise ConfigError(
            f"config.decoding.n_best={config.decoding.n_best} needs JSON lines or a table. "
            "Use --output=FILE.jsonl.",
            field="config.decoding.n_best",
            value=config.decoding.n_best,
        )
    reads = input_rows.describe_model_input(config, texts)
    dtype = _choose_dtype(config)
    tokenizers = read_tokenizers(workdir, config)
    _, params = read_mean(workdir, config)
    writer = Writer(config, params, tokenizers, dtype)
    return _Opened(config, params, tokenizers, reads, writer.answer, plain)


def _choose_dtype(config: Config) -> jnp.dtype:
    found = environment.find_devices(config)
    logging.info("Predicting on %s.", environment.describe_devices(found))
    return environment.compute_dtype(config, found[0])


def _predict(
    path: str,
    model: _Opened,
    given: tuple[str, Source, str, bool],
    output: str,
    input_format: str,
) -> PredictionResult:
    name, opened, key, streams = given
    chosen = input_rows.choose_format(name, input_format, model.reads)
    rows = input_rows.open_input(opened, chosen, model.reads, key)
    group = prediction_stream.as_they_come if streams else prediction_stream.in_full
    goes_on = not streams and not model.plain and _may_go_on(output)
    kept = unfinished_name(expand(output))
    done = 0
    with _open_output(output, keep=goes_on) as file:
        if goes_on:
            identity = prediction_resume.identify(
                path, model.config, model.params, model.tokenizers
            )
            done = prediction_resume.take_kept(kept, rows, identity, model.reads)
        measure = "score" if model.reads.kind == "writing" else "probability"
        lines = prediction_output.open_lines(
            file, _ending(output), plain=model.plain, measure=measure
        )
        try:
            new = prediction_stream.predict_stream(
                group(rows), model.answer, lines, model.reads, name, done
            )
            return PredictionResult(done + new, done)
        except prediction_stream.NothingPredictedError:
            if goes_on:
                kept.unlink(missing_ok=True)  # contains no prediction to resume from
            raise
        except BrokenPipeError:  # the reader of the output has exited, like `head -1`
            # Buffered output is flushed at exit and must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
            return PredictionResult(0, 0)


def _open_input(source: str) -> tuple[str, Source, str, bool]:
    """Returns (name, source, key of a JSON list, whether rows arrive over time).

    Raises:
      ConfigError: the source cannot be read.
    """
    if source == _PIPE:
        if sys.stdin is None:
            raise ConfigError("standard input is closed. Use --input=FILE.", field="--input")
        # Not sys.stdin: at exit a thread may still be blocked in a read.
        return "standard input", Stream("standard input", open(0, "rb", closefd=False)), "", True
    name, key = source, ""
    path = expand(source)
    if not path.exists() and "#" in source:
        name, _, key = source.partition("#")
        path = expand(name)
    try:
        with open(path, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            if not is_file:  # a named pipe can be opened only once
                file = os.fdopen(os.dup(file.fileno()), "rb")
    except OSError as error:
        raise ConfigError(
            f"--input={source} cannot be read: {error.strerror}.", field="--input", path=source
        ) from None
    return name, path if is_file else Stream(name, file), key, not is_file


def _is_pipe(output: str) -> bool:
    """Whether the output is a pipe or device, written directly."""
    return output == _PIPE or _is_special(expand(output))


def _check_output(output: str) -> None:
    if output == _PIPE:
        if sys.stdout is None:
            raise ConfigError("standard output is closed. Use --output=FILE.", field="--output")
        return
    path = expand(output)
    if path.exists() and not _is_special(path):
        raise ConfigError(
            f"--output={output} exists. Remove it or use another file.",
            field="--output",
            path=output,
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--output={output}: the folder {path.parent} does not exist.",
            field="--output",
            path=output,
        )


def _may_go_on(output: str) -> bool:
    """Whether predictions can be resumed: only JSON lines can be compared to the input."""
    path = expand(output)
    if _is_pipe(output):
        return False
    return path.suffix != ".gz" and path.suffix not in prediction_output.DELIMITERS


@contextlib.contextmanager
def _alone(output: str) -> Iterator[None]:
    """Locks the unfinished file of `output` against other processes; removes it if empty."""
    path = expand(output)
    if _is_pipe(output):
        yield
        return
    kept = unfinished_name(path)
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(kept, "ab", opener=storage.no_follow))
            unlockable = f"{kept} cannot be locked. Write it with a single process."
            free = try_lock(file, unlockable) and _is_at(file, kept)  # not moved or removed
        except OSError as error:
            raise _unwritable(output, error) from None
        if not free:
            raise ConfigError(
                f"--output={output} is being written by another process. Wait for it or use "
                "another file.",
                field="--output",
                path=output,
            )
        try:
            _check_output(output)  # again: another process may have finished it
            yield
        finally:
            if _is_at(file, kept) and not kept.stat().st_size:
                kept.unlink()
            if not kept.exists():
                prediction_resume.note_of(kept).unlink(missing_ok=True)


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _open_output(output: str, *, keep: bool) -> Iterator[IO[bytes]]:
    path = expand(output)
    try:
        if output == _PIPE:
            yield sys.stdout.buffer
        elif _is_special(path):
            with open(path, "wb") as file:
                yield file
        else:
            with replacing(path, "ab" if keep else "wb", keep=keep) as file:
                if not output.endswith(".gz"):
                    yield file
                    return
                with gzip.GzipFile(fileobj=file, mode="wb") as packed:
                    yield packed
    except OSError as error:
        raise _unwritable(output, error) from None


def _unwritable(output: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"--output={output} cannot be written: {error.strerror}.", field="--output", path=output
    )


def _is_special(path: Path) -> bool:
    """Whether the path is a named pipe or a device."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _ending(output: str) -> str:
    path = Path(output)
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix
