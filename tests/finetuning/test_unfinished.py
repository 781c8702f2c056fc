"""The run that is under way: gone on with, left for another one, or damaged in words."""

import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.files import DamagedFileError
from convbert_jax.finetuning.unfinished import FOLDER, RUN, Unfinished


def state(value: float):
    return {"kernel": jnp.full((3, 4), value)}, {"count": jnp.asarray(int(value))}


@pytest.fixture
def kept(tmp_path):
    """A folder with a run that was stopped after 7 steps."""
    unfinished = Unfinished(tmp_path, {"task": "cola", "seeds": [0, 1]}, 5.0)
    unfinished.keep(state(2), 7)
    unfinished.close()
    return tmp_path


def test_it_goes_on(kept):
    unfinished = Unfinished(kept, {"task": "cola", "seeds": [0, 1]}, 5.0)
    (params, _), step = unfinished.resume(state(0))
    unfinished.close()
    assert step == 7
    np.testing.assert_array_equal(params["kernel"], state(2)[0]["kernel"])


def test_another_run_is_removed(kept):
    assert Unfinished(kept, {"task": "mrpc", "seeds": [0, 1]}, 5.0).resume(state(0))[1] == 0
    assert not (kept / FOLDER).exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"task": ', b"[" * 100_000])
def test_a_damaged_record_costs_no_checkpoint(kept, content):
    (kept / FOLDER / RUN).write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"run\.json is damaged .*delete .*unfinished"):
        Unfinished(kept, {"task": "cola"}, 5.0).resume(state(0))
    assert (kept / FOLDER / "checkpoints" / "7").is_dir()
