"""The files that the tables of text to text are made from."""

import pytest

from benchmarks.quality import text_pairs


@pytest.mark.parametrize(
    ("form", "wanted"),
    [
        (
            "* captain ( x _ 1 ) ; eat . agent ( x _ 2 , x _ 1 )",
            "eat ( agent = * captain )",
        ),
        (  # an argument of two events is written twice
            "* girl ( x _ 1 ) ; need . agent ( x _ 2 , x _ 1 ) AND need . xcomp ( x _ 2 , x _ 4 ) "
            "AND cook . agent ( x _ 4 , x _ 1 )",
            "need ( agent = * girl , xcomp = cook ( agent = * girl ) )",
        ),
        (  # a name stands for itself, what a noun stands beside goes with it
            "* ring ( x _ 3 ) ; eat . agent ( x _ 1 , Emma ) AND eat . theme ( x _ 1 , x _ 3 ) AND "
            "ring . nmod . beside ( x _ 3 , x _ 6 ) AND bed ( x _ 6 )",
            "eat ( agent = Emma , theme = * ring ( nmod . beside = bed ) )",
        ),
    ],
)
def test_a_logical_form_without_variables(form, wanted):
    assert text_pairs.variable_free(form) == wanted


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("LAMBDA a . LAMBDA e . touch . agent ( e , a )", "is no term"),
        ("cake ( x _ 1 )", "has 0 outermost events"),
        ("eat . agent ( x _ 1 , Emma ) AND run . agent ( x _ 3 , Liam )", "has 2 outermost events"),
    ],
)
def test_a_form_of_another_kind_is_refused(form, why):
    with pytest.raises(ValueError, match=why):
        text_pairs.variable_free(form)


def test_the_files_of_real_sets(real_data, monkeypatch):
    monkeypatch.setenv("CONVBERT_DATA", str(real_data))
    files = {name: rows for name, _, rows in text_pairs.cogs()}  # checks 24,012 forms
    assert [len(files[f"cogs-{name}"]) for name in ("train", "dev", "test")] == [
        24_155,
        3_000,
        3_000,
    ]
    cases = {name: rows for name, rows in files.items() if name.startswith("cogs-gen-")}
    assert len(cases.pop("cogs-gen-2100")) == 2_100
    assert len(cases) == 21
    assert {len(rows) for rows in cases.values()} == {1_000}
    for _, _, rows in text_pairs.scan():
        assert all(set(steps) <= set("LRWONJ ") for _, steps in rows)
