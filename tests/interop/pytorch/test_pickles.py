"""Pickles are read as data: what is plain comes back, what would be run is refused by name, and no
bytes whatever do anything else.
"""

import collections
import io
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convbert_jax.interop.pytorch import pickles
from convbert_jax.interop.pytorch.pickles import Made, PickleError
from tests.interop.test_hostile_files import limits

KEYS = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.tuples(st.text()))
PLAIN = st.recursive(
    st.one_of(KEYS, st.floats(allow_nan=False)),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=20,
)


def load(content: bytes):
    return pickles.load(io.BytesIO(content))


def load_or_refuse(content: bytes) -> str:
    """The sentence that refuses a pickle, "" of one that is read."""
    try:
        load(content)
    except PickleError as error:
        return str(error)
    return ""


@given(PLAIN, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values_come_back(value, protocol):
    shared = {"a": value, "b": value, "c": collections.OrderedDict(d=value)}
    found = load(pickle.dumps(shared, protocol))
    assert found == shared
    if isinstance(value, list | dict):
        assert found["a"] is found["b"]


@given(st.binary(), st.integers(3, pickle.HIGHEST_PROTOCOL))
def test_bytes_come_back(value, protocol):
    assert load(pickle.dumps(value, protocol)) == value


def test_a_list_that_holds_itself():
    value = [1]
    value.append(value)
    found = load(pickle.dumps(value))
    assert found[1] is found
    assert len(found) == 2


def test_several_in_a_row():
    file = io.BytesIO(pickle.dumps(1, 2) + pickle.dumps("two", 2) + b"rest")
    assert [pickles.load(file), pickles.load(file), file.read()] == [1, "two", b"rest"]


class Runs:
    def __init__(self, *called):
        self.called = called

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    ("called", "arguments"),
    [
        (os.system, ("touch executed",)),
        (eval, ("open('executed', 'w')",)),
        (exec, ("open('executed', 'w')",)),
        (open, ("executed", "w")),
        (getattr, (os, "system")),
        (__import__, ("os",)),
        (os.mkdir, ("executed",)),
    ],
    ids=str,
)
def test_nothing_is_run(called, arguments, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        content = pickle.dumps([1, Runs(called, arguments)], protocol)
    except (TypeError, pickle.PicklingError):
        content = pickle.dumps([1, Runs(called, ())], protocol)  # a module is no argument
    with pytest.raises(PickleError, match="which no checkpoint needs and nothing here runs"):
        load(content)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name",
    [
        b"torch.hub\nload", b"torch\nload", b"torch.os\nsystem", b"argparse\n_os.system",
        b"builtins\neval", b"fairseq\n", b"numpy\nload", b"pathlib\nos.system",
        b"\n", b"omegaconf\n",
    ],
)  # fmt: skip
def test_names_are_those_of_a_list(name):
    with pytest.raises(PickleError):
        load(b"c" + name + b"\n.")


def test_what_is_named_is_only_named():
    """A class that exists nowhere, its arguments and its state."""
    made = load(b"cfairseq.tasks\nNowhere\n(K\x01tR}X\x01\x00\x00\x00aK\x02sb.")
    assert (made.name, made.arguments, made.state) == ("fairseq.tasks.Nowhere", (1,), {"a": 2})
    assert isinstance(made, Made)
    assert repr(made) == "a fairseq.tasks.Nowhere"


DEEP = 500_000
HOSTILE = {
    "tuples in tuples as a key": b"}(" + b")" + b"\x85" * DEEP + b"K\x01u.",
    "a list as a key": b"}(]K\x01u.",
    "a dict as a key": b"}(}K\x01u.",
    "a list in a set": b"\x8f(]\x90.",
    "items of a list": b"](K\x01K\x02u.",
    "items of a number": b"K\x01(K\x01K\x02u.",
    "an odd number of items": b"}(K\x01u.",
    "appended to a dict": b"}K\x01a.",
    "a call of a number": b"K\x01)R.",
    "a call of a string": b"X\x02\x00\x00\x00os)R.",
    "a call without arguments": b"cargparse\nNamespace\nK\x01R.",
    "a name of numbers": b"K\x01K\x02\x93.",
    "an empty stack": b".",
    "taken of an empty stack": b"\x87.",
    "a mark that is not there": b"t.",
    "a memory that is not there": b"h\x07.",
    "a persistent id": b"K\x01Q.",
    "an extension": b"\x82\x01.",
    "a buffer": b"\x97.",
    "no end": b"K\x01",
    "a string without an end": b"X\xff\xff\xff\x7fab",
    "a giant of bytes": b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a long number in letters": b"I" + b"9" * 10_000 + b"\n.",
    "not a number": b"Ix\n.",
    "an ordered dict of numbers": b"ccollections\nOrderedDict\n(K\x01tR.",
    "operations without end": b"0" + b"NN00" * 1_000_000 + b".",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused(name):
    with limits(), pytest.raises(PickleError) as found:
        load(HOSTILE[name])
    assert "\n" not in str(found.value)
    assert len(str(found.value)) < 400


@pytest.mark.parametrize("opened", [b"\x85", b"(l", b"]\x94"], ids=["tuples", "lists", "flat"])
def test_depth_is_no_danger(opened):
    with limits():
        load(b")" + opened * DEEP + b".")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(content):
    assert "\n" not in load_or_refuse(content)


@given(
    st.lists(
        st.sampled_from(
            [bytes([i]) for i in range(256)]
            + [b"K\x01", b"}", b"]", b"(", b"cargparse\nNamespace\n", b"q\x00h\x00"]
        )
    )
)
def test_any_operations_are_a_value_or_refused(operations):
    assert "\n" not in load_or_refuse(b"".join(operations) + b".")


@given(PLAIN, st.data())
def test_a_changed_byte_is_a_value_or_refused(value, data):
    content = bytearray(pickle.dumps({"a": value}, data.draw(st.integers(0, 5))))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert "\n" not in load_or_refuse(bytes(content))
