"""What a token costs on a TPU, by the compiler's model."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.running import needs_libtpu

pytestmark = [pytest.mark.slow, needs_libtpu]


def price(*arguments: str) -> dict[int, list[float]]:
    """Of each number of rows: cycles of the prompt and of a token, the floor, and the ratios."""
    command = [sys.executable, "-m", "benchmarks.layers.written_tokens", "--layers=2", *arguments]
    printed = subprocess.run(
        command, cwd=REPOSITORY, check=True, capture_output=True, text=True
    ).stdout
    lines = [line.split() for line in printed.splitlines()[2:] if "without an" not in line]
    return {int(rows): [float(number) for number in numbers] for _, rows, *numbers in lines}


def test_a_token_of_one_text_is_cheaper_than_that_of_many():
    """Products of a vector would cost it twice as much."""
    found = price("--mixers=light", "--rows", "1", "8", "--given=64", "--steps=16")
    assert found[1][1] < 1.02 * found[8][1]


def test_attention_reads_what_is_kept_near_the_speed_of_memory():
    """Of a query alone it takes eight times as long as the memory does, of eight less than two."""
    (numbers,) = price("--mixers=attention", "--rows", "32").values()
    _, token, floor, ratio, _, _ = numbers
    assert ratio == pytest.approx(token / floor, abs=0.01)
    assert ratio < 2


def test_the_texts_of_a_beam_read_their_prompt_once():
    arguments = ("--mixers=attention", "--given=128", "--steps=8")
    (beam,) = price(*arguments, "--rows", "8", "--beam=4").values()
    (alone,) = price(*arguments, "--rows", "32").values()
    assert beam[2] < alone[2]
    assert (beam[5] > 0, alone[5]) == (True, 0)  # these are never packed
