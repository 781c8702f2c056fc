"""Run plans of a sweep: steps for equal FLOPs, parameters, time and cost."""

import dataclasses
import json

import pytest

from convbert_jax import config_files
from convbert_jax.analysis import flops, overview, plans
from convbert_jax.config import to_dict
from convbert_jax.interop import matching
from convbert_jax.sweeps import Sweep, SweepError, Variant
from convbert_jax.sweeps.runs import (
    check_files,
    count_flops,
    count_parameters,
    count_tokens,
    describe,
    describe_changes,
    expand,
)
from convbert_jax.sweeps.table import FINISHED, Record
from tests.refusals import refused

VARIANTS = {"attention": Variant({"model.mixer": "attention"}), "mixed": Variant()}
SWEEP = Sweep("tiny", VARIANTS, seeds=(0, 1))


def test_steps_follow_from_flops_and_fractions(folder):
    variants = {
        **VARIANTS,
        "equal": Variant({"model.kernel_size": 3}, match_flops_of="attention"),
        "both": Variant({"objective.masked_lm_steps": "30%"}),
    }
    sweep = Sweep("tiny", variants, seeds=(0,))
    for overrides, first_steps in ({}, 240), ({"train.steps": 300}, 90):
        runs = {run.variant: run for run in expand(sweep, folder, overrides)}
        spent = {name: flops.training_flops(run.config) for name, run in runs.items()}
        assert spent["equal"] == pytest.approx(spent["attention"], rel=2e-3)  # whole steps
        assert spent["mixed"] < 0.99 * spent["attention"]
        assert runs["both"].config.objective.masked_lm_steps == first_steps
    steps = runs["equal"].config.train.steps
    assert steps != 300
    assert {name: describe_changes(variants[name], run) for name, run in runs.items()} == {
        "attention": "model.mixer=attention",
        "mixed": "",
        "equal": f"model.kernel_size=3 train.steps={steps}",
        "both": "objective.masked_lm_steps=30%",
    }
    with refused(SweepError, field="--config.objective.masked_lm_steps"):
        expand(sweep, folder, {"objective.masked_lm_steps": 7})


def test_variants_may_have_phases_and_lengths_in_tokens(folder):
    halves = [{"name": "a", "length": "50%"}, {"name": "b", "length": "50%", "batch_size": 64}]
    variants = {
        "one": Variant(),
        "two": Variant({"phases": halves}),
        "equal": Variant({"model.mixer": "attention"}, match_flops_of="two"),
    }
    step = 32 * 64  # tokens
    runs = expand(
        Sweep("tiny", variants, seeds=(0,)), folder, {"train.steps": f"{100 * step} tokens"}
    )
    one, two, equal = runs
    assert (one.config.train.steps, count_tokens(one)) == (100, 100 * step)
    assert (two.config.phase_lengths, count_tokens(two)) == ((50, 25), 100 * step)
    assert describe_changes(variants["two"], two) == f"phases={json.dumps(halves)}"
    assert count_flops(equal, folder) == pytest.approx(count_flops(two, folder), rel=1e-2)
    with refused(SweepError, field="config.train.steps", value="1 epoch") as caught:
        expand(SWEEP, folder, {"train.steps": "1 epoch"})
    assert "variant" not in str(caught.value)  # an error of all variants


def test_the_size_of_a_vocabulary_file_counts(folder, tmp_path):
    """The vocabulary size is read from the file, as at the start of a run."""
    path = tmp_path / "vocab.txt"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    path.write_text("\n".join([*special, *(f"w{i}" for i in range(20_000))]) + "\n")
    variants = {
        **VARIANTS,
        "equal": Variant({"model.mixer": "separable"}, match_flops_of="attention"),
    }
    sweep = Sweep("tiny", variants, seeds=(0,))
    runs = {run.variant: run for run in expand(sweep, folder, {"tokenizer.path": str(path)})}
    named = {"tokenizer.path": str(path), "tokenizer.kind": "wordpiece"}
    real = {
        name: matching.replace(run.config, {**named, "tokenizer.vocab_size": 20_005})
        for name, run in runs.items()
    }
    spent = {name: flops.training_flops(config) for name, config in real.items()}
    assert spent["equal"] == pytest.approx(spent["attention"], rel=2e-3)
    assert {name: count_flops(run, folder) for name, run in runs.items()} == spent
    fewer = count_parameters(expand(sweep, folder)[0], folder)
    more = (20_005 - 4_096) * (
        real["attention"].model.embedding_size + 1
    )  # embeddings, output bias
    assert count_parameters(runs["attention"], folder) == fewer + more
    path.unlink()
    with refused(SweepError, "vocab.txt"):
        check_files(runs.values(), folder)


@pytest.mark.parametrize("size", ["small", "base"])
def test_translation_models_have_about_equal_parameters(folder, tmp_path, size):
    for name in ("de", "en"):
        (tmp_path / name).write_text("text\n")
    sweep = config_files.load_sweep(f"ablation:translation,{size}")
    source = f"parallel:{tmp_path}/de,{tmp_path}/en"
    runs = expand(dataclasses.replace(sweep, seeds=(0,)), folder, {"parallel.source": source})
    counts = {run.variant: count_parameters(run, folder) for run in runs}
    assert counts == pytest.approx(dict.fromkeys(counts, counts["attention"]), rel=0.03)


def test_the_plan_shows_size_state_time_and_cost(folder, monkeypatch):
    monkeypatch.setattr(plans, "_measure_products", lambda *_: 1e11)
    runs = expand(SWEEP, folder)
    folder.write(Record(runs[0].id, FINISHED, to_dict(runs[0].config), ("main",)))
    text = describe(SWEEP, runs, folder)
    line = next(line for line in text.splitlines() if line.startswith("| attention"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # 800 steps of 32 rows of 64 tokens
    assert cells[:4] == ["attention", "pretrain", "1,421,825", "1.64e+06"]
    assert cells[5:] == ["1 finished, 1 new", "model.mixer=attention"]
    total = sum(count_flops(run, folder) for run in runs)
    for share in (0.65, 0.2):  # share of this CPU's speed
        assert overview.spell_time(total / share / 1e11) in text
    for topology, chips, peak in (
        ("v5e-16", 16, 16 * 197e12),
        ("v5e:4x4", 16, 16 * 197e12),
        ("2xv4-8", 8, 8 * 275e12),
        ("tpu7x-8", 4, 4 * 2307e12),
        ("gpu:h100x2", 2, 2 * 989e12),
    ):
        seconds = total / (0.3 * peak)
        text = describe(SWEEP, runs, folder, topology, 1_500_000)
        assert f"{overview.spell_time(seconds)} at 30%" in text
        assert f"{seconds / 3_600 * chips * 1_500_000:,.2f}" in text
