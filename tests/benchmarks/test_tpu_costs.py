"""Costs by the TPU compiler's model, as printed by scripts of benchmarks/."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY
from tests.running import needs_libtpu

pytestmark = [pytest.mark.slow, pytest.mark.tpu_compile, needs_libtpu]


def printed(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", f"benchmarks.{script}", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_attention_kernels_cost_a_third_of_scores_in_memory():
    shared = ("--ops", "attention", "--only", "xla", "pallas_tpu", "--segments")
    for length, batch in (("128", "64"), ("512", "16")):
        shape = ("--length", length, "--batch", batch, "--directions", "forward_backward")
        rows = map(cells, printed("layers.ops", *shared, *shape)[3:])
        cycles = {row[1]: float(row[3].replace(",", "")) for row in rows}
        assert cycles["pallas_tpu"] < cycles["xla"] / 3
        assert cycles["pallas_tpu, dropout"] < cycles["xla, dropout"] / 3
        # Dropout bits are drawn while the matrix unit works.
        assert cycles["pallas_tpu, dropout"] < 1.1 * cycles["pallas_tpu"]


def test_the_table_of_a_step_has_a_row_for_each_config():
    tiny = ("--config.model.layers=1", "--config.tokenizer.vocab_size=200")
    _, header, _, ours, operations, theirs, _ = printed(
        "step", "--configs", "tiny", "electra-tiny", "--shapes", "8x128", "--operations", "1", *tiny
    )
    assert ours.startswith("| tiny, 8x128 | ")
    assert theirs.startswith("| electra-tiny, 8x128 | ")
    assert header.count("|") == ours.count("|") == theirs.count("|")
    assert " x " in operations


def written_tokens(*arguments: str) -> dict[int, list[float]]:
    """Returns, by number of rows: cycles of the prompt and of a token, the floor, the ratios."""
    lines = printed("layers.written_tokens", "--layers=2", *arguments)[3:]
    rows = [cells(line) for line in lines if "without an" not in line]
    return {
        int(count): [float(number.replace(",", "")) for number in numbers]
        for _, count, *numbers in rows
    }


def test_a_token_of_one_text_costs_no_more_than_one_of_eight():
    """A matrix-vector product would cost twice as much."""
    found = written_tokens("--mixers=light", "--rows", "1", "8", "--given=64", "--steps=16")
    assert found[1][1] < 1.02 * found[8][1]


def test_attention_reads_the_cache_near_the_speed_of_memory():
    """One query takes at most eight times the memory time, eight queries less than twice."""
    (numbers,) = written_tokens("--mixers=attention", "--rows", "32").values()
    _, token, floor, ratio, _, _ = numbers
    assert ratio == pytest.approx(token / floor, abs=0.01)
    assert ratio < 2


def test_the_texts_of_a_beam_read_their_prompt_once():
    arguments = ("--mixers=attention", "--given=128", "--steps=8")
    (beam,) = written_tokens(*arguments, "--rows", "8", "--beam=4").values()
    (alone,) = written_tokens(*arguments, "--rows", "32").values()
    assert beam[2] < alone[2]
    assert (beam[5] > 0, alone[5]) == (True, 0)  # a single text is never repacked
