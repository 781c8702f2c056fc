"""Validation of generative models, parallel text and decoding."""

from collections.abc import Collection

from convbert_jax.config.checks.rules import check, check_choice, check_encoding
from convbert_jax.config.run import Config
from convbert_jax.config.sequences.sections import (
    ACTIVATIONS,
    BAD_PAIRS,
    METHODS,
    NORMALIZATIONS,
    NORMS,
    POSITIONS,
    SCORE_WORDS,
)

# Fields of config.decoding that only one method uses.
_OF_METHOD = {"beam": "beam", "temperature": "sample", "top_k": "sample", "top_p": "sample"}

_DECODER_SCHEDULES = ("decoder_kernel_sizes", "decoder_dilations")


def check_sequences(config: Config) -> None:
    """Raises ConfigError for the first invalid field, for every recipe."""
    s = config.sequence
    check_choice("sequence.norm", s.norm, NORMS)
    check_choice("sequence.normalization", s.normalization, NORMALIZATIONS)
    check_choice("sequence.activation", s.activation, ACTIVATIONS)
    check_choice("sequence.positions", s.positions, POSITIONS)
    check(
        s.last_dropout == 0 or (s.norm == "pre" and s.last_norm),
        "is applied after the final norm, which this model does not have; set it to 0, or "
        "config.sequence.norm=pre with last_norm.",
        field="config.sequence.last_dropout",
        value=s.last_dropout,
    )
    _check_parallel(config)
    _check_decoding(config)
    if config.writes_text:
        _check_writing(config)


def check_asked(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a field that was set explicitly but has no effect.

    Args:
      asked: paths of the fields that were set, as "decoding.beam".
    """
    check(
        "train.batch_size" not in asked or not config.reads_pairs,
        "has no effect on pairs of texts; remove it and set config.parallel.batch_tokens, the rows "
        "of a batch times the tokens of the longer text.",
        field="config.train.batch_size",
        value=config.train.batch_size,
    )
    check_asked_decoding(config, asked)


def check_asked_decoding(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a decoding field that was set but is not used by the method.

    Args:
      asked: paths of the fields that were set, as "decoding.beam".
    """
    d = config.decoding
    for name, method in _OF_METHOD.items():
        check(
            f"decoding.{name}" not in asked or d.method == method or not config.writes_text,
            f"has no effect with config.decoding.method={d.method}; remove it, or set "
            f"config.decoding.method={method}.",
            field=f"config.decoding.{name}",
            value=getattr(d, name),
        )


def check_sequence_model(config: Config) -> None:
    """Runs the checks that need the mixers of a generative model; loads jax."""
    _ = config.language_model if config.recipe == "causal_lm" else config.encoder_decoder


def _check_parallel(config: Config) -> None:
    p, t = config.parallel, config.tokenizer
    check_choice("parallel.bad_pairs", p.bad_pairs, BAD_PAIRS)
    check_encoding("parallel.encoding", p.encoding)
    check(
        len(p.columns) != 1,
        "must name the columns of source and target, optionally followed by columns of further "
        "references.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        len(set(p.columns)) == len(p.columns),
        "contains a column twice; remove one.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        len(p.columns) <= 2 or p.validation_source != "" or config.decoding.tests != (),
        "names further references, which are used only with config.parallel.validation_source "
        "or config.decoding.test_sources; set one of these, or name two columns.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        p.max_ratio == 0 or p.max_ratio >= 1,
        "would exclude all pairs; use 1 or more, or 0 for no limit.",
        field="config.parallel.max_ratio",
        value=p.max_ratio,
    )
    check(
        not p.from_scratch or config.init_from != "",
        "takes sizes and vocabulary from config.init_from, which is empty; unset it, or set "
        "config.init_from.",
        field="config.parallel.from_scratch",
        value=True,
    )
    check(
        p.heldout_fraction > 0 or p.validation_source != "",
        "leaves no pairs for evaluation; raise it or set config.parallel.validation_source.",
        field="config.parallel.heldout_fraction",
        value=0,
    )
    check(
        p.sampling == 0 or (t.kind == "sentencepiece" and (t.path or t.algorithm == "unigram")),
        "needs a unigram vocabulary; set it to 0, or config.tokenizer.kind=sentencepiece "
        "and algorithm=unigram.",
        field="config.parallel.sampling",
        value=p.sampling,
    )
    check(
        not config.sequence.shared_vocabulary
        or (p.target_vocab_size == 0 and not p.target_vocabulary),
        "and target_vocabulary need a separate target vocabulary; set "
        "config.sequence.shared_vocabulary=False.",
        field="config.parallel.target_vocab_size",
    )
    check(
        p.batch_tokens >= p.max_length,
        f"is less than one text of config.parallel.max_length={p.max_length} tokens; raise it or "
        "lower max_length.",
        field="config.parallel.batch_tokens",
        value=p.batch_tokens,
    )


def _check_decoding(config: Config) -> None:
    d = config.decoding
    check_choice("decoding.method", d.method, METHODS)
    check_choice("decoding.score_words", d.score_words, SCORE_WORDS)
    check(
        d.n_best <= d.beam or d.method != "beam",
        f"is larger than config.decoding.beam={d.beam}; raise the beam.",
        field="config.decoding.n_best",
        value=d.n_best,
    )
    check(
        d.n_best == 1 or d.method != "greedy",
        f"config.decoding.n_best={d.n_best}, but config.decoding.method=greedy generates one text; "
        "set method to beam or sample.",
        field="config.decoding.n_best",
        value=d.n_best,
    )
    check(
        d.length_ratio > 0 or d.length_extra > 0,
        "and config.decoding.length_extra=0 limit outputs to 0 tokens; raise one of them.",
        field="config.decoding.length_ratio",
        value=0,
    )
    smallest = min(config.vocabularies)
    check(
        d.method != "beam" or 2 * d.beam <= smallest,
        f"needs {2 * d.beam} candidate tokens, but the vocabulary has {smallest}; "
        f"set it to at most {smallest // 2}.",
        field="config.decoding.beam",
        value=d.beam,
    )
    check(
        d.average == 1 or d.average <= config.checkpoint.keep,
        f"is larger than config.checkpoint.keep={config.checkpoint.keep}, the number of kept "
        "checkpoints; raise keep.",
        field="config.decoding.average",
        value=d.average,
    )
    for name, source in d.tests:
        check(
            name != "",
            f"contains '{source}', which must be NAME=SOURCE, as 2016=parallel:test.en,test.de.",
            field="config.decoding.test_sources",
        )
    names = [name for name, _ in d.tests]
    twice = [name for name in names if names.count(name) > 1 or name == "validation"]
    check(
        not twice,
        f"contains the name '{twice[0] if twice else ''}' twice, or it is the name of the held-out "
        "pairs; use unique names.",
        field="config.decoding.test_sources",
    )


def _check_writing(config: Config) -> None:
    m, s, o = config.model, config.sequence, config.optimizer
    learned = s.positions == "learned"
    longest = config.parallel.max_length if config.reads_pairs else config.data.length
    field = "parallel.max_length" if config.reads_pairs else "data.length"
    check(
        not learned or longest <= m.positions,
        f"is longer than config.model.positions={m.positions} learned positions; raise positions, "
        "shorten the texts or set config.sequence.positions=sinusoidal.",
        field=f"config.{field}",
        value=longest,
    )
    check(
        config.reads_pairs or config.data.layout == "packed",
        f"needs whole documents; set config.data.layout=packed, not {config.data.layout}.",
        field="config.recipe",
        value=config.recipe,
    )
    check(
        config.reads_pairs or s.shared_vocabulary,
        "needs a single vocabulary; set config.sequence.shared_vocabulary=True.",
        field="config.recipe",
        value=config.recipe,
    )
    check(
        config.recipe != "causal_lm" or s.decoder_layers in (0, m.layers),
        "is for encoder-decoders; with config.recipe='causal_lm' set config.model.layers.",
        field="config.sequence.decoder_layers",
        value=s.decoder_layers,
    )
    for name in ("decoder_mixer", "decoder_mixer_fields", *_DECODER_SCHEDULES):
        value = getattr(s, name)
        spelled = value if isinstance(value, str) else ",".join(map(str, value))
        check(
            config.recipe != "causal_lm" or not value,
            "is for encoder-decoders; with config.recipe='causal_lm' set "
            f"config.model.{name.removeprefix('decoder_')}.",
            field=f"config.sequence.{name}",
            value=spelled,
        )
    layers = s.decoder_layers or m.layers
    for name in _DECODER_SCHEDULES:
        numbers = getattr(s, name)
        check(
            not numbers or len(numbers) == layers,
            f"has {len(numbers)} numbers, but the decoder has {layers} layers "
            "(config.sequence.decoder_layers, by default as the encoder); set one number per "
            "layer.",
            field=f"config.sequence.{name}",
        )
    check(
        config.checkpoint.huggingface_every == 0,
        f"config.checkpoint.huggingface_every={config.checkpoint.huggingface_every}: transformers "
        "has no class for these models; set it to 0.",
        field="config.checkpoint.huggingface_every",
        value=config.checkpoint.huggingface_every,
    )
    check(
        not config.distillation.teacher,
        f"is for encoders; unset it with config.recipe='{config.recipe}'.",
        field="config.distillation.teacher",
        value=config.distillation.teacher,
    )
    check(
        o.release_replicas == 1,
        f"is for encoders; set it to 1 with config.recipe='{config.recipe}'.",
        field="config.optimizer.release_replicas",
        value=o.release_replicas,
    )
