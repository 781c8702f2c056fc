"""Rows of a set, however batches bring them."""

import numpy as np

from convbert_jax.finetuning.predictions.collected import ROW, rows_evaluator


def batch(rows):
    return {ROW: np.array(rows), "logits": np.array([[10.0 * row] for row in rows])}


def test_rows_come_in_their_order_without_fillers():
    evaluator = rows_evaluator(4, ("sum",), lambda found: {"sum": float(found["logits"].sum())})
    state = evaluator.init()
    for rows in ([2, 0], [3, -1], [1, -1]):
        state = evaluator.update(state, batch(rows))
    np.testing.assert_array_equal(state.predicted()["logits"], [[0.0], [10.0], [20.0], [30.0]])
    assert evaluator.finish(state) == {"sum": 60.0}
    assert evaluator.names == ("sum",)


def test_rows_of_two_lengths_stay_a_list():
    evaluator = rows_evaluator(2)
    outputs = [{ROW: np.array([row]), "tags": np.zeros((1, row + 1))} for row in (1, 0)]
    state = evaluator.init()
    for one in outputs:
        state = evaluator.update(state, one)
    assert [values.shape for values in state.predicted()["tags"]] == [(1,), (2,)]
    assert evaluator.finish(state) == {}
