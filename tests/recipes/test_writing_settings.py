"""What a score says of how its texts were written."""

import pytest

from convbert_jax.config import Config
from convbert_jax.interop.matching import replace
from convbert_jax.recipes.writing import settings

REST = "at most 90 tokens; checkpoint 7; bfloat16"


@pytest.mark.parametrize(
    ("fields", "names", "said"),
    [
        ({"method": "greedy", "length_penalty": 0.6}, set(), "greedy"),
        (
            {"method": "beam", "beam": 5, "length_penalty": 0.6},
            {"beam", "length_penalty"},
            "beam 5, score / length^0.6",
        ),
        (
            {"method": "sample", "top_k": 20, "temperature": 0.7},
            {"n_best", "length_penalty", "temperature", "top_k", "top_p", "seed"},
            "sampled (temperature 0.7, top k 20, top p 1, seed 3)",
        ),
        (
            {"method": "sample", "n_best": 4},
            {"n_best", "length_penalty", "temperature", "top_k", "top_p", "seed"},
            "sampled (temperature 1, top k 0, top p 1, seed 3), the best of 4, score / length^1",
        ),
    ],
)
def test_what_the_method_reads_is_said_and_nothing_else(fields, names, said):
    fields = {"length_ratio": 0.0, "length_extra": 90, **fields}
    config = replace(
        Config(recipe="translation", seed=3),
        {f"decoding.{name}": value for name, value in fields.items()},
    )
    found = settings.collect(config, [7], "bfloat16")
    always = {"method", "length_ratio", "length_extra", "checkpoints", "dtype"}
    assert set(found) == always | names
    assert settings.describe(found) == f"{said}; {REST}"
