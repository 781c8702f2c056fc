"""The run that is under way: gone on with, left for another one, or damaged in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from convbert_jax.files import DamagedFileError
from convbert_jax.finetuning.unfinished import Unfinished
from convbert_jax.training.environment import peers
from convbert_jax.training.state import TrainState
from convbert_jax.workdir import Workdir


def state(value: float, step: int = 0) -> TrainState:
    params = {"kernel": jnp.full((3, 4), value)}
    return TrainState(jnp.asarray(step, jnp.int32), params, {"count": jnp.asarray(int(value))})


def places():
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state(0)
    )


@pytest.fixture
def kept(tmp_path):
    """A folder with a run that was stopped after 7 steps."""
    unfinished = Unfinished(Workdir(tmp_path), {"task": "cola", "seeds": [0, 1]}, 5.0)
    unfinished.keep(state(2, step=7))
    unfinished.close()
    return tmp_path


def test_it_goes_on(kept):
    unfinished = Unfinished(Workdir(kept), {"task": "cola", "seeds": [0, 1]}, 5.0)
    found = unfinished.resume(places())
    unfinished.close()
    assert found.step == 7
    np.testing.assert_array_equal(found.params["kernel"], state(2).params["kernel"])


def test_another_run_is_removed(kept):
    run = {"task": "mrpc", "seeds": [0, 1]}
    assert Unfinished(Workdir(kept), run, 5.0).resume(places()) is None
    assert not Workdir(kept).unfinished.path.exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"task": ', b"[" * 100_000])
def test_a_damaged_record_costs_no_checkpoint(kept, content):
    Workdir(kept).unfinished.unfinished_run.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"run\.json is damaged .*delete .*unfinished"):
        Unfinished(Workdir(kept), {"task": "cola"}, 5.0).resume(places())
    assert (Workdir(kept).unfinished.checkpoints / "7").is_dir()


@pytest.mark.parametrize("seen", [True, False])
def test_the_first_process_decides_what_is_here(kept, monkeypatch, seen):
    """Whatever another one sees: a run that is not there, or none where there is one."""
    run = {"task": "cola", "seeds": [0, 1]}
    first = Unfinished(Workdir(kept), run, 5.0)._look()
    nothing = Unfinished(Workdir(kept / "empty"), run, 5.0)._look()
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(peers, "choice_of_first", lambda value: first if seen else nothing)
    found = Unfinished(Workdir(kept), run, 5.0)
    state = found.resume(places())
    found.close()
    assert (state is not None) == seen
    assert Workdir(kept).unfinished.path.is_dir()
