"""What the section of parallel text must satisfy."""

from convbert_jax.config.checks.rules import check, check_choice
from convbert_jax.config.run import Config
from convbert_jax.config.sections import BAD_PAIRS


def check_parallel(config: Config) -> None:
    """Raises ConfigError for the first thing that cannot work."""
    p, t = config.parallel, config.tokenizer
    check_choice("parallel.bad_pairs", p.bad_pairs, BAD_PAIRS)
    check(
        len(p.columns) in (0, 2),
        f"config.parallel.columns={','.join(p.columns)} must name two columns, the source's and "
        "the target's.",
    )
    check(
        p.max_ratio == 0 or p.max_ratio >= 1,
        f"config.parallel.max_ratio={p.max_ratio:g} would leave no pair; use 1 or more, or 0 for "
        "any.",
    )
    check(
        p.heldout_fraction > 0 or p.validation_source != "",
        "config.parallel.heldout_fraction=0 leaves nothing to evaluate on; raise it or name "
        "config.parallel.validation_source.",
    )
    check(
        p.sampling == 0 or (t.kind == "sentencepiece" and (t.path or t.algorithm == "unigram")),
        f"config.parallel.sampling={p.sampling:g} is of unigram vocabularies; set it to "
        "0, or config.tokenizer.kind=sentencepiece and algorithm=unigram.",
    )
    check(
        not p.shared_vocabulary or (p.target_vocab_size == 0 and not p.target_vocabulary),
        "config.parallel.target_vocab_size and target_vocabulary are of a vocabulary of the "
        "target's own; set config.parallel.shared_vocabulary=False with them.",
    )
    check(
        p.batch_tokens >= p.max_length,
        f"config.parallel.batch_tokens={p.batch_tokens} is less than one text of "
        f"config.parallel.max_length={p.max_length}; raise it or shorten the texts.",
    )
