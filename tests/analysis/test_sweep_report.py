"""Report of a sweep: significance of differences, and written files."""

import csv
import math

import numpy as np
import pytest

from convbert_jax.analysis import sweep_report
from convbert_jax.analysis.sweep_report import RunOutcome, SweepOutcome, VariantInfo

# AUC per seed: `better` is above `plain` by 0.100, 0.101, 0.099; `noisy` by -0.1, 0.1, 0.3
AUC = {
    "plain": (0.60, 0.64, 0.68),
    "better": (0.700, 0.741, 0.779),
    "noisy": (0.50, 0.74, 0.98),
    "broken": (),
}


def make_outcome(**changes) -> SweepOutcome:
    runs = [
        RunOutcome(
            variant,
            seed,
            "pretrain",
            "finished",
            seconds=3.0,
            values={"discriminator_auc": value, "tokens_per_second": 1000.0, "hidden": 1.0},
            curve=tuple(
                {
                    **{"step": step, "tokens": 64 * step, "flops": 1e6 * step},
                    **{"seconds": 0.1 * step, "discriminator_auc": value - 1 / step},
                }
                for step in (10, 20)
            ),
        )
        for variant, values in AUC.items()
        for seed, value in enumerate(values)
    ]
    runs += [
        RunOutcome("plain", 0, "trec", "finished", values={"test accuracy": 0.5}),
        RunOutcome("better", 0, "trec", "finished", values={"test accuracy": math.nan}),
        RunOutcome("broken", 0, "pretrain", "failed", why="out of memory"),
    ]
    fields = {
        "name": "table",
        "purpose": "Which one?",
        "variants": {name: VariantInfo(f"model.mixer={name}", 1234, 6400, 1e9) for name in AUC},
        "baseline": "plain",
        "metrics": ("discriminator_auc", "tokens_per_second"),
        "runs": tuple(runs),
    }
    return SweepOutcome(**fields | changes)


def test_a_paired_test_by_hand():
    # differences 1, 2, 3: mean 2, standard error 1/sqrt(3), t = 2 sqrt(3); with 2 degrees of
    # freedom p = 1 - t / sqrt(2 + t^2), and 97.5% of t lie below 4.3027
    values, baseline = {0: 2.0, 1: 4.0, 2: 6.0, 3: 9.0}, {2: 3.0, 1: 2.0, 0: 1.0}
    result = sweep_report.compare("a", "pretrain", "m", values, baseline)
    assert result.p == pytest.approx(1 - math.sqrt(12 / 14))
    half = 4.302653 / math.sqrt(3)
    found = (result.difference.mean, result.difference.low, result.difference.high)
    assert found == pytest.approx((2, 2 - half, 2 + half), abs=1e-5)
    assert (result.difference.count, result.value.count) == (3, 4)
    assert result.value.mean == pytest.approx(21 / 4)
    back = sweep_report.compare("a", "s", "m", baseline, values)
    assert (back.p, back.difference.mean) == pytest.approx((result.p, -2))


@pytest.mark.parametrize(
    ("differences", "p"),
    [
        ([1.0], math.nan),
        ([0.0, 0.0], 1.0),
        ([0.5, 0.5, 0.5], math.nan),
        ([0.625 - 0.5, 0.750000000001 - 0.625], math.nan),  # two of sixteen texts, twice
    ],
)
def test_equal_differences_have_no_test(differences, p):
    assert sweep_report.paired_test(differences) == pytest.approx(p, nan_ok=True)


def test_p_values_are_corrected_after_holm():
    # 0.01 x 3; 0.03 x 2; and 0.04 x 1, raised to the previous value
    assert sweep_report.holm([0.01, math.nan, 0.04, 0.03], 3) == pytest.approx(
        [0.03, math.nan, 0.06, 0.06], nan_ok=True
    )
    assert sweep_report.holm([0.9, 0.8], 2) == [1.0, 1.0]
    # variants without results count, so adding results later does not weaken significance
    part = make_outcome(runs=tuple(r for r in make_outcome().runs if r.variant != "noisy"))
    better, again = (
        next(one.p_holm for one in sweep_report.compare_all(outcome) if one.variant == "better")
        for outcome in (part, make_outcome())
    )
    assert better == pytest.approx(again)


def test_equal_variants_are_seldom_significant():
    """At most 5% of sweeps have a false positive; accuracies of 277 texts are often equal."""
    random, tries = np.random.default_rng(0), 200
    alarms = np.zeros(2)
    for _ in range(tries):
        accuracy = np.round(277 * (0.7 + 0.01 * random.normal(size=(9, 2)))) / 277
        loss = 10 * random.normal(size=(1, 4)) + random.normal(size=(6, 4))  # shared by a seed
        for kind, values in enumerate((accuracy, loss)):
            p = [sweep_report.paired_test(list(row - values[0])) for row in values[1:]]
            corrected = [p for p in sweep_report.holm(p, len(p)) if not math.isnan(p)]
            alarms[kind] += min(corrected, default=1.0) < sweep_report.LEVEL
    assert (alarms / tries < sweep_report.LEVEL + 0.03).all()


def test_which_differences_are_significant():
    found = {(one.variant, one.metric): one for one in sweep_report.compare_all(make_outcome())}
    significant = {key: one.significant for key, one in found.items()}
    assert significant == {
        ("plain", "discriminator_auc"): None,
        ("better", "discriminator_auc"): True,
        ("noisy", "discriminator_auc"): False,
        ("plain", "tokens_per_second"): None,
        ("better", "tokens_per_second"): False,  # bitwise equal
        ("noisy", "tokens_per_second"): False,
        ("plain", "test accuracy"): None,
        ("better", "test accuracy"): None,
    }
    diverged = found["better", "test accuracy"]
    assert (diverged.diverged, diverged.value.count) == (1, 0)


def read_table(text: str, stage: str) -> dict[str, list[str]]:
    """Returns variant -> cells of the Markdown table of a stage."""
    lines = text.partition(f"## {stage}")[2].partition("##")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    return {row[0]: row[1:] for row in rows}


def test_the_files_of_a_report(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    text = sweep_report.write(make_outcome(), tmp_path)
    assert text == (tmp_path / "report.md").read_text()
    rows = read_table(text, "pretrain")
    assert rows["plain"][:6] == ["1,234", "6.4e+03", "1e+09", "3", "0.6400 ± 0.0994", ""]
    assert rows["better"][5].startswith("+0.1000 [+0.0975, ")
    assert [row[6][-1:] for row in rows.values() if row[3] == "3"] == ["", "*", "6"]
    assert rows["broken"][3:7] == ["0", "", "", ""]
    assert read_table(text, "trec")["better"][:2] == ["0", "none (1 diverged)"]
    assert "- broken/seed-0/pretrain: out of memory" in text
    assert "- better: model.mixer=better" in text
    assert "12 runs: 11 finished, 1 failed." in text
    with (tmp_path / "variants.csv").open() as file:
        table = {(r["variant"], r["metric"]): r for r in csv.DictReader(file)}
    assert float(table["better", "discriminator_auc"]["difference"]) == pytest.approx(0.1)
    assert table["plain", "discriminator_auc"]["difference"] == ""
    with (tmp_path / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 12
    assert runs[0]["hidden"] == "1.0"  # includes metrics that the report hides
    assert (runs[-1]["state"], runs[-1]["why"]) == ("failed", "out of memory")
    for name in ("means.png", "curves.png"):
        assert f"]({name})" in text
        pixels = image.imread(tmp_path / name)
        assert min(pixels.shape[:2]) > 200
        assert pixels[..., :3].std() > 0.02  # something is drawn
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((3.2e-5, "0.0000320"), (0.0, "0.0000"), (0.74, "0.7400"), (-2e-3, "-0.00200")),
        *((2e5, "200,000"), (123.4, "123.4"), (0.01, "0.0100")),
    ],
)
def test_numbers_keep_their_significant_digits(tmp_path, value, shown):
    runs = (RunOutcome("plain", 0, "pretrain", "finished", values={"discriminator_auc": value}),)
    text = sweep_report.write(make_outcome(runs=runs), tmp_path)
    assert read_table(text, "pretrain")["plain"][4] == shown


def test_a_report_without_results(tmp_path):
    runs = (RunOutcome("plain", 0, "pretrain", "new"),)
    text = sweep_report.write(make_outcome(runs=runs), tmp_path)
    assert "1 runs: 1 new." in text
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["report.md", "runs.csv", "variants.csv"]
