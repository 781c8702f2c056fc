"""What /proc/cpuinfo says of the processor."""

import pytest

from convbert_jax.machine.processor import multiplies_bfloat16

_OF_A_CORE = "processor\t: {}\nvendor_id\t: GenuineIntel\nflags\t\t: fpu {} sse2\n\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (_OF_A_CORE.format(0, "avx512_bf16 amx_bf16 amx_tile") * 2, True),
        (_OF_A_CORE.format(0, "avx512_bf16 amx_tile"), False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", False),  # ARM has other words
        ("", False),
    ],
)
def test_the_matrix_unit_is_among_the_flags(text, found, tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert multiplies_bfloat16(path) == found


def test_where_there_is_no_such_file_there_is_no_unit(tmp_path):
    assert not multiplies_bfloat16(tmp_path / "absent")
