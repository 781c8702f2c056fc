"""What a config comes to, against published counts and hand-made ones."""

import re

import pytest

import convbert_jax
from convbert_jax.analysis import overview
from convbert_jax.config import to_dict
from convbert_jax.interop.networks import abstract_params


def describe(config) -> str:
    return overview.describe(config, abstract_params(config))


def numbers(text: str, line: str) -> list[float]:
    (found,) = re.findall(rf"^ *{line} .*$", text, re.MULTILINE)
    return [float(n.replace(",", "")) for n in re.findall(r"\d[\d,]*\.?\d*(?:e[+]?\d+)?", found)]


def test_the_published_base():
    config = convbert_jax.load_config("base")
    text = describe(config)
    assert "256 rows x 128 = 32,768 tokens" in text
    assert "1,000,000 steps, 32.8 G tokens" in text
    (per_step, whole) = numbers(text, "operations")
    assert whole == pytest.approx(1e6 * per_step, rel=1e-2)
    parts = re.findall(r"^  (\w+) +([\d,]+)$", text, re.MULTILINE)
    counts = {name: int(count.replace(",", "")) for name, count in parts}
    assert sum(n for name, n in counts.items() if name != "all") == counts["all"]
    # Twice the operations take a chip twice as long.
    longer = describe(convbert_jax.load_config(config, **{"train.steps": 2_000_000}))
    days = [numbers(t, "TPU v5e")[1] for t in (text, longer)]
    assert days[1] == pytest.approx(2 * days[0], rel=0.02)


def test_memory_is_what_the_optimizer_keeps():
    config = convbert_jax.load_config("tiny", **{"optimizer.method": "adamw"})
    text = describe(config)
    whole = numbers(text, "all")[0]
    assert numbers(text, "memory beside activations")[0] == round(16 * whole / 2**20)
    # Vectors and matrices with a side below 128 have a moment of their own.
    less = describe(convbert_jax.load_config(config, **{"optimizer.method": "adafactor"}))
    assert 8 * whole < numbers(less, "memory beside activations")[0] * 2**20 < 11 * whole
    # One moment of the matrices of the layers: by hand, of the two networks.
    matrices = sum(
        layers * (6 * c * c // 2 + (c // 2) * taps * heads + 2 * c * 4 * c + c * c // 2)
        for layers, c, taps, heads in ((4, 128, 9, 2), (1, 64, 9, 1))
    )
    muon = describe(convbert_jax.load_config(config, **{"optimizer.method": "muon"}))
    assert numbers(muon, "memory beside activations")[0] == round(
        (16 * whole - 4 * matrices) / 2**20
    )


@pytest.mark.parametrize("name", ["translation", "language_model", "span_corruption:t5_base,light"])
def test_models_that_write(name):
    config = convbert_jax.load_config(name)
    text = describe(config)
    assert "decoder" in text
    assert ("config.parallel.source is not named yet" in text) == config.reads_pairs
    assert bool(re.search(r"steps, at most \S+ \w tokens$", text, re.M)) == config.reads_pairs
    assert to_dict(config)["recipe"] in text


def test_a_million_less_one_is_a_million():
    assert [overview._count(n) for n in (999, 999_499, 999_999)] == ["999", "999 k", "1 M"]


def test_fine_tuning_names_its_runs():
    text = describe(convbert_jax.load_config("glue:cola"))
    assert re.search(r"tasks +cola", text)
    assert re.search(r"runs of each +1 learning rates x 1 numbers of epochs x 5 seeds$", text, re.M)
    assert not re.search(r"^  head", text, re.MULTILINE)


def test_every_field_is_shown_with_its_value():
    config = convbert_jax.load_config("tiny", **{"train.batch_size": 48})
    text = overview.describe(config, abstract_params(config), ["finetune", "model.remat"])
    lines = dict(line.split(": ", 1) for line in text.split("\n\n")[0].splitlines())
    assert "finetune" not in lines
    assert "remat=" not in lines["model"]
    assert "batch_size=48" in lines["train"].split()
    for section in ("objective", "optimizer", "data"):
        for field, value in to_dict(config)[section].items():
            assert f"{field}={value!r}" in lines[section]
