"""Pair-specific properties: records, skipped pairs, vocabularies, shapes and cut texts."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from convbert_jax.config import ConfigError, PairFormat, from_config_dict
from convbert_jax.data.batching import (
    list_shapes,
    make_plan,
    pair_evaluation_batches,
    pair_training_batches,
)
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel_text import prepare
from convbert_jax.data.shards import Pair, id_dtype, pairs_to_records, records_to_pairs
from tests.data.kinds import PairsKind, changed
from tests.data.parallel.conftest import write_files
from tests.refusals import refused


@pytest.fixture
def kind(pairs, make_config):
    return PairsKind(pairs, make_config)


def texts_of(text, rows):
    """Count each pair of texts in rows."""
    source, target = text.vocabularies
    return collections.Counter((source.decode(a), target.decode(b)) for a, b in rows)


@pytest.mark.parametrize("form", [PairFormat(2), PairFormat(3), PairFormat(2, scored=True)])
@pytest.mark.parametrize("vocab", [100, 70_000])
def test_records_come_back(vocab, form):
    dtype = id_dtype(vocab, 50)
    ids = [row[: form.texts] for row in ([[1, vocab - 1], [3], [5, 6]], [[7], [], [8]])]
    said = [("ä b", "c", "d")[: form.texts], ("",) * form.texts]
    scores = [0.5, -3.0] if form.scored else [None, None]
    pairs = list(map(Pair, ids, said, scores))
    back = records_to_pairs(pairs_to_records(pairs, dtype), dtype, form=form)
    assert [[part.tolist() for part in row.ids] for row in back] == ids
    assert [row.texts for row in back] == said
    assert [row.score for row in back] == scores
    with pytest.raises(ValueError):  # noqa: PT011  (internal error, not a user error)
        records_to_pairs([pairs_to_records(pairs, dtype)[0] + b"x"], dtype, form=form)


def test_bad_pairs_are_counted_and_the_first_is_named(pairs, make_config, tmp_path, caplog):
    bad = [("ba", "  "), ("", "ba"), ("ba " * 200, "ba"), ("ba", "di do du de da di do du")]
    bad = [*pairs[:50], *bad, *pairs[50:]]
    config = make_config(write_files(tmp_path, bad), max_length=100, max_ratio=6.0)
    caplog.set_level("INFO", logger="absl")
    text = prepare(config, tmp_path / "prepared")
    for kind, parts in (
        ("(empty)", (f"2 of {len(bad)}", "train.bb line 51")),  # the file with the empty text
        ("(long)", (f"1 of {len(bad)}", "train.aa line 53", "config.parallel.max_length=100")),
        ("(uneven)", ("line 54", "config.parallel.max_ratio=6")),
    ):
        (line,) = (message for message in caplog.messages if kind in message)
        for part in parts:
            assert part in line
    lengths = np.concatenate([split.lengths for split in text.splits.values()])
    assert lengths.max() <= 100
    assert (lengths.max(axis=1) <= 6 * lengths.min(axis=1)).all()
    strict = changed(config, "parallel.bad_pairs", "error")
    field = "config.parallel.bad_pairs"
    with refused(DataError, "train.bb line 51", field=field, path=text.directory):
        prepare(strict, tmp_path / "prepared")
    with refused(DataError, field=field, path=tmp_path / "train.bb", line=51):
        prepare(strict, tmp_path / "elsewhere")


def test_long_sources_are_cut_on_request_and_targets_never(
    kind, pairs, make_config, tmp_path, caplog
):
    more = [("ba " * 200, "ba di"), ("ba", "di " * 200), ("du " * 150, "ba do")]
    config = make_config(write_files(tmp_path, pairs + more), max_length=100, cut_sources=True)
    caplog.set_level("INFO", logger="absl")
    text = prepare(config, tmp_path / "prepared")
    rows = [row for split in text.splits for row in kind.read(text, split)]
    found = {text.vocabularies.target.decode(b): a for a, b in rows if len(a) == 99}
    assert set(found) == {"ba di", "ba do"}
    whole = text.vocabularies.source.encode(["ba " * 200])[0]
    assert found["ba di"] == tuple(whole[:99])
    assert len(rows) == len(pairs) + 2
    for count, parts in (
        (2, (f"line {len(pairs) + 1}", f"{len(whole) + 1}")),
        (1, ("long", f"line {len(pairs) + 2}")),
    ):
        start = (count, len(pairs) + 3)
        (logged,) = (each.args for each in caplog.records if tuple(each.args or ())[:2] == start)
        for part in parts:
            assert part in str(logged)
    with refused(DataError, "cut_sources", path=text.directory):
        prepare(changed(config, "parallel.cut_sources", False), tmp_path / "prepared")


def test_two_vocabularies(kind, prepared, pairs, make_config, tmp_path):
    fields = {"shared_vocabulary": False, "target_vocab_size": 120}
    text = prepare(make_config(write_files(tmp_path, pairs), **fields), tmp_path / "prepared")
    source, target = text.vocabularies
    assert (source.vocab_size, target.vocab_size) == (160, 120)
    assert source.path.parent.name == "source"
    rows = [row for split in text.splits for row in kind.read(text, split)]
    assert texts_of(text, rows) == collections.Counter(pairs)
    one = prepared[1]
    assert one.vocabularies.source is one.vocabularies.target
    assert one.fingerprint != text.fingerprint


def test_fields_that_cannot_be_are_refused():
    for field, value, mention in (
        ("columns", ["a"], "config.parallel.columns"),
        ("max_ratio", 0.5, "config.parallel.max_ratio"),
        ("from_scratch", True, "config.init_from"),
        ("heldout_fraction", 0.0, "config.parallel.heldout_fraction"),
        ("target_vocab_size", 99, "shared_vocabulary=False"),
        ("sampling", 1.5, "config.parallel.sampling"),
        ("batch_tokens", 100, "config.parallel.batch_tokens"),
        ("bad_pairs", "skipp", "'skip'"),
    ):
        with refused(ConfigError, mention):
            from_config_dict({"parallel": {field: value}})


# --- Batches ---


def take(batches, count):
    result = list(itertools.islice(batches, count))
    batches.close()
    return result


def same(first, second):
    return len(first) == len(second) > 0 and all(
        np.array_equal(a[name], b[name])
        for a, b in zip(first, second, strict=True)
        for name in PairsKind.fields
    )


def test_batches_have_few_shapes_and_the_labels_of_their_texts(prepared):
    config, text = prepared
    section = config.parallel
    shapes = {(s.rows, s.source, s.target) for s in list_shapes(text, section, 2)}
    assert 1 < len(shapes) <= section.shapes
    batches = pair_training_batches(text, section, seed=3, row_multiple=2)
    special = text.vocabularies.target.special
    for batch in take(batches, make_plan(text, section, 3, 2).batches):
        assert (*batch["source"].shape, batch["tokens"].shape[1]) in shapes
        for row, size in enumerate((batch["segment_ids"] != 0).sum(axis=1)):
            if not size:
                continue
            labels, tokens = batch["labels"][row, :size], batch["tokens"][row, :size]
            ends = batch["source"][row, (batch["source_ids"][row] != 0).sum() - 1], labels[-1]
            assert ends == (special.sep, special.sep)
            assert tokens[0] == special.cls
            assert (tokens[1:] == labels[:-1]).all()
    for devices in (2, 4, 8):  # 8 of the longest fit, so shapes equal those of one device
        wide = dataclasses.replace(section, batch_tokens=1_000)
        assert list_shapes(text, wide, devices) == list_shapes(text, wide)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_other_devices_go_on_with_the_batches_that_there_were(prepared, prefetch):
    config, text = prepared
    # Fewer rows than the current shapes, as in a run on other devices.
    began = pair_training_batches(text, config.parallel, seed=5, prefetch=0)
    shapes = [[s.rows - 2, s.source, s.target] for s in list_shapes(text, config.parallel)]
    state = began.get_state() | {"shapes": shapes}
    began.set_state(state)
    whole = list(itertools.islice(began, 5))
    later = began.get_state()
    began.close()
    assert {len(batch["tokens"]) for batch in whole} <= {rows for rows, *_ in shapes}
    assert later["shapes"] == shapes
    batches = pair_training_batches(
        text, config.parallel, seed=5, row_multiple=2, prefetch=prefetch
    )
    batches.set_state(state)
    assert same(list(itertools.islice(batches, 5)), whole)
    assert batches.get_state() == later
    batches.close()
    many = pair_training_batches(text, config.parallel, seed=5, row_multiple=4, prefetch=prefetch)
    with refused(DataError, 4, field="config.train.accumulation"):
        many.set_state(state)
    many.close()


def test_texts_are_cut_anew_in_each_epoch(kind, pairs, make_config, tmp_path):
    config = make_config(write_files(tmp_path, pairs), sampling=0.3)
    text = prepare(config, tmp_path / "prepared")

    def run(skipped=0):
        batches = pair_training_batches(text, config.parallel, seed=1)
        count = make_plan(text, config.parallel, 1).batches
        batches.set_state(batches.get_state() | {"next_batch": skipped})
        return take(batches, 2 * count - skipped), count

    whole, count = run()
    assert same(run(count + 2)[0], whole[count + 2 :])
    epochs = [
        [row for batch in part for row in kind.rows(batch)]
        for part in (whole[:count], whole[count:])
    ]
    # The same texts, now cut into other pieces.
    first, second = (texts_of(text, epoch) for epoch in epochs)
    assert first == second
    held = [row for b in pair_evaluation_batches(text, config.parallel) for row in kind.rows(b)]
    assert first + texts_of(text, held) == collections.Counter(pairs)
    pieces = [sum(len(source) + 1 for source, _ in epoch) for epoch in epochs]
    assert pieces[0] != pieces[1]
    assert pieces[0] > text.splits["train"].counts["source_tokens"]


def test_documents_that_are_too_long_are_drawn_anew_too(kind, pairs, make_config, tmp_path):
    document = " ".join(source for source, _ in pairs[:40])
    spec = write_files(tmp_path, [*pairs[:60], (document, "only this")])
    config = make_config(spec, sampling=0.3, max_length=64, cut_sources=True, heldout_fraction=0.05)
    text = prepare(config, tmp_path / "prepared")
    batches = pair_training_batches(text, config.parallel, seed=1)
    rows = [
        row
        for b in take(batches, 3 * make_plan(text, config.parallel, 1).batches)
        for row in kind.rows(b)
    ]
    drawn = [source for source, _ in rows if len(source) == 63]
    assert len(drawn) == 3
    assert len(set(drawn)) > 1
    for source in drawn:
        assert document.startswith(text.vocabularies.source.decode(source))
