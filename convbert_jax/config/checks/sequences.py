"""What models that write text must satisfy, their pairs, and how they write."""

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

# Fields of config.decoding that one method alone reads.
_OF_METHOD = {"beam": "beam", "temperature": "sample", "top_k": "sample", "top_p": "sample"}

_DECODER_SCHEDULES = ("decoder_kernel_sizes", "decoder_dilations")


def check_sequences(config: Config) -> None:
    """Raises ConfigError for the first thing that cannot work, whatever the recipe."""
    s = config.sequence
    check_choice("sequence.norm", s.norm, NORMS)
    check_choice("sequence.normalization", s.normalization, NORMALIZATIONS)
    check_choice("sequence.activation", s.activation, ACTIVATIONS)
    check_choice("sequence.positions", s.positions, POSITIONS)
    check(
        s.last_dropout == 0 or (s.norm == "pre" and s.last_norm),
        "is behind the last norm of pre-norm, which is not there; set it to 0, or "
        "config.sequence.norm=pre with last_norm.",
        field="config.sequence.last_dropout",
        value=s.last_dropout,
    )
    _check_parallel(config)
    _check_decoding(config)
    if config.writes_text:
        _check_writing(config)


def check_asked(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a field that is `asked` for by its path and that nothing reads: one of
    the decoding, or the batch of rows where it reads pairs.
    """
    check(
        "train.batch_size" not in asked or not config.reads_pairs,
        "has no effect on pairs of texts; leave it out and set "
        "config.parallel.batch_tokens, the rows of a batch times the tokens of the "
        "longer text.",
        field="config.train.batch_size",
        value=config.train.batch_size,
    )
    check_asked_decoding(config, asked)


def check_asked_decoding(config: Config, asked: Collection[str]) -> None:
    """Raises ConfigError for a field that is `asked` for by its path, as "decoding.beam", and that
    config.decoding.method does not read.
    """
    d = config.decoding
    for name, method in _OF_METHOD.items():
        check(
            f"decoding.{name}" not in asked or d.method == method or not config.writes_text,
            f"has no effect with config.decoding.method={d.method}; leave it out, or set "
            f"config.decoding.method={method}.",
            field=f"config.decoding.{name}",
            value=getattr(d, name),
        )


def check_sequence_model(config: Config) -> None:
    """What only the mixers themselves know, of a recipe that writes text; loads jax."""
    _ = config.language_model if config.recipe == "causal_lm" else config.encoder_decoder


def _check_parallel(config: Config) -> None:
    p, t = config.parallel, config.tokenizer
    check_choice("parallel.bad_pairs", p.bad_pairs, BAD_PAIRS)
    check_encoding("parallel.encoding", p.encoding)
    check(
        len(p.columns) != 1,
        "must name two columns, the source's and the target's, and may name those of "
        "further references.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        len(set(p.columns)) == len(p.columns),
        "names one column twice; name each once.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        len(p.columns) <= 2 or p.validation_source != "" or config.decoding.tests != (),
        "names further references, which are read of config.parallel.validation_source "
        "and config.decoding.test_sources alone; name one of these, or two columns.",
        field="config.parallel.columns",
        value=",".join(p.columns),
    )
    check(
        p.max_ratio == 0 or p.max_ratio >= 1,
        "would leave no pair; use 1 or more, or 0 for any.",
        field="config.parallel.max_ratio",
        value=p.max_ratio,
    )
    check(
        not p.from_scratch or config.init_from != "",
        "takes sizes and vocabulary of config.init_from, which is empty; leave it out, "
        "or name a run.",
        field="config.parallel.from_scratch",
        value=True,
    )
    check(
        p.heldout_fraction > 0 or p.validation_source != "",
        "leaves nothing to evaluate on; raise it or name config.parallel.validation_source.",
        field="config.parallel.heldout_fraction",
        value=0,
    )
    check(
        p.sampling == 0 or (t.kind == "sentencepiece" and (t.path or t.algorithm == "unigram")),
        "is of unigram vocabularies; set it to 0, or config.tokenizer.kind=sentencepiece "
        "and algorithm=unigram.",
        field="config.parallel.sampling",
        value=p.sampling,
    )
    check(
        not config.sequence.shared_vocabulary
        or (p.target_vocab_size == 0 and not p.target_vocabulary),
        "and target_vocabulary are of a vocabulary of the target's own; set "
        "config.sequence.shared_vocabulary=False with them.",
        field="config.parallel.target_vocab_size",
    )
    check(
        p.batch_tokens >= p.max_length,
        f"is less than one text of config.parallel.max_length={p.max_length}; raise it or "
        "shorten the texts.",
        field="config.parallel.batch_tokens",
        value=p.batch_tokens,
    )


def _check_decoding(config: Config) -> None:
    d = config.decoding
    check_choice("decoding.method", d.method, METHODS)
    check_choice("decoding.score_words", d.score_words, SCORE_WORDS)
    check(
        d.n_best <= d.beam or d.method != "beam",
        f"is more than config.decoding.beam={d.beam} finds; raise the beam.",
        field="config.decoding.n_best",
        value=d.n_best,
    )
    check(
        d.n_best == 1 or d.method != "greedy",
        f"config.decoding.n_best={d.n_best}, but config.decoding.method=greedy writes one text; "
        "set method to beam or sample.",
        field="config.decoding.n_best",
        value=d.n_best,
    )
    check(
        d.length_ratio > 0 or d.length_extra > 0,
        "and config.decoding.length_extra=0 leave no room for a word; raise one of them.",
        field="config.decoding.length_ratio",
        value=0,
    )
    smallest = min(config.vocabularies)
    check(
        d.method != "beam" or 2 * d.beam <= smallest,
        f"looks at {2 * d.beam} words at a time, more than the vocabulary's {smallest}; "
        f"make it at most {smallest // 2}.",
        field="config.decoding.beam",
        value=d.beam,
    )
    check(
        d.average == 1 or d.average <= config.checkpoint.keep,
        f"checkpoints, but config.checkpoint.keep={config.checkpoint.keep} are kept; "
        "raise keep to as many.",
        field="config.decoding.average",
        value=d.average,
    )
    for name, source in d.tests:
        check(
            name != "",
            f"has '{source}', which must be NAME=SOURCE, as 2016=parallel:test.en,test.de.",
            field="config.decoding.test_sources",
        )
    names = [name for name, _ in d.tests]
    twice = [name for name in names if names.count(name) > 1 or name == "validation"]
    check(
        not twice,
        f"has '{twice[0] if twice else ''}' twice, or as the held-out pairs are called; "
        "give each set a name of its own.",
        field="config.decoding.test_sources",
    )


def _check_writing(config: Config) -> None:
    m, s, o = config.model, config.sequence, config.optimizer
    learned = s.positions == "learned"
    longest = config.parallel.max_length if config.reads_pairs else config.data.length
    field = "parallel.max_length" if config.reads_pairs else "data.length"
    check(
        not learned or longest <= m.positions,
        f"is longer than config.model.positions={m.positions}, the learned ones; raise positions, "
        "shorten the texts or set config.sequence.positions=sinusoidal.",
        field=f"config.{field}",
        value=longest,
    )
    check(
        config.reads_pairs or config.data.layout == "packed",
        f"reads whole documents; set config.data.layout=packed, not {config.data.layout}.",
        field="config.recipe",
        value=config.recipe,
    )
    check(
        config.reads_pairs or s.shared_vocabulary,
        "has one text and one vocabulary; set config.sequence.shared_vocabulary=True.",
        field="config.recipe",
        value=config.recipe,
    )
    check(
        config.recipe != "causal_lm" or s.decoder_layers in (0, m.layers),
        "is of an encoder-decoder; the one stack of config.recipe='causal_lm' is "
        "config.model.layers.",
        field="config.sequence.decoder_layers",
        value=s.decoder_layers,
    )
    for name in ("decoder_mixer", "decoder_mixer_fields", *_DECODER_SCHEDULES):
        value = getattr(s, name)
        spelled = value if isinstance(value, str) else ",".join(map(str, value))
        check(
            config.recipe != "causal_lm" or not value,
            "is of an encoder-decoder; the one stack of config.recipe='causal_lm' has "
            f"config.model.{name.removeprefix('decoder_')}.",
            field=f"config.sequence.{name}",
            value=spelled,
        )
    layers = s.decoder_layers or m.layers
    for name in _DECODER_SCHEDULES:
        numbers = getattr(s, name)
        check(
            not numbers or len(numbers) == layers,
            f"has {len(numbers)} numbers, but the decoder has {layers} layers, "
            "config.sequence.decoder_layers or as many as the encoder; give one for each "
            "layer.",
            field=f"config.sequence.{name}",
        )
    check(
        config.checkpoint.huggingface_every == 0,
        f"config.checkpoint.huggingface_every={config.checkpoint.huggingface_every}: a model that "
        "writes text has no class in Hugging Face's library; set it to 0.",
        field="config.checkpoint.huggingface_every",
        value=config.checkpoint.huggingface_every,
    )
    check(
        not config.distillation.teacher,
        f"teaches encoders; unset it with config.recipe='{config.recipe}'.",
        field="config.distillation.teacher",
        value=config.distillation.teacher,
    )
    check(
        o.release_replicas == 1,
        f"is of the release's encoders; set it to 1 with config.recipe='{config.recipe}'.",
        field="config.optimizer.release_replicas",
        value=o.release_replicas,
    )
