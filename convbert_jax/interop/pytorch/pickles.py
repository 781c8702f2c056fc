"""Pickles as data: what a pickle would call is named, checked against a list and never called.

Python's own unpickler imports what a file names and calls it with what the file says. This one
walks the operations that `pickletools` reads off and makes of each object a `Made`: the name of
what would have been called, the arguments and the state. Nothing is imported, nothing is run.
"""

import dataclasses
import pickletools
import re
from collections.abc import Callable
from typing import IO, Any

from convbert_jax.interop.claims import shown

_MOST_OPERATIONS = 1 << 21  # a large model with the state of Adam has some 100,000
_PRIMITIVE = (type(None), bool, int, float, str, bytes)
# What a file may name, though nothing of it is run: a file that names others is no checkpoint.
_KNOWN = re.compile(
    r"torch\._utils\._rebuild_(tensor|tensor_v2|parameter)"
    r"|torch(\.cuda)?\.\w+Storage|torch\.storage\.\w+Storage|torch\.(Size|device|[a-z]+\d+|bool)"
    r"|collections\.(OrderedDict|defaultdict|Counter)|argparse\.Namespace"
    r"|(builtins|__builtin__)\.(dict|list|set|frozenset|tuple|int|long|float|str|unicode|bool|object|bytes)"
    r"|(copyreg|copy_reg)\._reconstructor|_codecs\.encode|typing\.\w+|pathlib\.\w+Path"
    r"|numpy\.dtype|numpy\.(_core|core)\.multiarray\.(scalar|_reconstruct)|numpy\.ndarray"
    r"|omegaconf(\.\w+)+|fairseq(\.\w+)+"
)
_VALUES = {
    *("BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_DICTS = ("collections.OrderedDict", "collections.defaultdict", "builtins.dict", "__builtin__.dict")


class PickleError(ValueError):
    """A pickle that is damaged, or holds what is not data."""


@dataclasses.dataclass(frozen=True)
class Name:
    """What a pickle would import, as MODULE.NAME."""

    name: str


@dataclasses.dataclass(eq=False)
class Made:
    """An object that would have been made by calling `name`.

    Attributes:
      state: what it would have been given afterwards: usually a dict of its fields.
    """

    name: str
    arguments: tuple
    state: Any = None

    def __repr__(self) -> str:  # what is inside may hold itself
        return f"a {self.name}"


def load(
    file: IO[bytes],
    make: Callable[[str, tuple], Any] = lambda name, arguments: Made(name, arguments),
    find: Callable[[Any], Any] | None = None,
) -> Any:
    """The one pickle that begins where `file` stands; behind it `file` stands at its end.

    Args:
      make: (name, arguments) -> value, for each object that would be made by a call; dicts of
        every kind are dicts without it.
      find: a persistent id -> value; None: there may be none.

    Raises:
      PickleError: it is damaged, names what no checkpoint needs, or is larger than any.
    """
    machine = _Machine(make, find)
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(file)):
            if count > _MOST_OPERATIONS:
                raise PickleError(f"more than {_MOST_OPERATIONS:,} operations")
            machine.run(operation.name, argument)
        return machine.pop()
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise PickleError(f"its pickle is damaged: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """What an error of a library says, for a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0][:200].rstrip(".") if lines else type(error).__name__


class _Machine:
    """The stack of a pickle, and what it remembers."""

    def __init__(self, make, find):
        self._make, self._find = make, find
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # stacks below each mark
        self._memo: dict[int, Any] = {}

    def pop(self) -> Any:
        return self._stack.pop()

    def run(self, name: str, argument: Any) -> None:
        if name in _VALUES:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            self._push_tuple(self._take(_TUPLES[name]))
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[argument] = self._stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            self._stack.append(self._memo[argument])
        elif name in _OPERATIONS:
            _OPERATIONS[name](self)
        elif name in ("GLOBAL", "INST"):
            named = _known(*argument.split(" ", 1))
            made = named if name == "GLOBAL" else self._made(named, tuple(self._marked()))
            self._stack.append(made)
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"its pickle has the operation {name}, which no checkpoint has")

    def mark(self) -> None:
        self._below.append(self._stack)
        self._stack = []

    def push_list(self) -> None:
        self._stack.append([])

    def push_dict(self) -> None:
        self._stack.append({})

    def push_set(self) -> None:
        self._stack.append(set())

    def marked_tuple(self) -> None:
        self._push_tuple(self._marked())

    def marked_list(self) -> None:
        found = self._marked()  # which makes another list the stack
        self._stack.append(found)

    def marked_dict(self) -> None:
        found = self._marked()
        self._stack.append({})
        self._set(found)

    def marked_frozenset(self) -> None:
        found = self._marked()
        self._stack.append(frozenset(map(_key, found)))

    def drop_marked(self) -> None:
        self._marked()

    def drop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._marked()

    def duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def append(self) -> None:
        self._extend(self._take(1))

    def extend(self) -> None:
        self._extend(self._marked())

    def set_item(self) -> None:
        self._set(self._take(2))

    def set_items(self) -> None:
        self._set(self._marked())

    def add_items(self) -> None:
        found = self._marked()
        if not isinstance(self._stack[-1], set):
            raise PickleError("its pickle adds to what is no set")
        self._stack[-1].update(map(_key, found))

    def name(self) -> None:
        module, name = self._take(2)
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("its pickle names something without a name")
        self._stack.append(_known(module, name))

    def call(self) -> None:
        called, arguments = self._take(2)
        self._stack.append(self._made(called, arguments))

    def call_named(self) -> None:
        called, arguments, _ = self._take(3)
        self._stack.append(self._made(called, arguments))

    def call_marked(self) -> None:
        called, *arguments = self._marked()
        self._stack.append(self._made(called, tuple(arguments)))

    def build(self) -> None:
        """A dict's state is of its class alone, as PyTorch's `_metadata`."""
        (state,) = self._take(1)
        if isinstance(self._stack[-1], Made):
            self._stack[-1].state = state

    def persistent(self) -> None:
        if self._find is None:
            raise PickleError("its pickle names objects that are not in it")
        self._stack.append(self._find(self.pop()))

    def _push_tuple(self, values: list[Any]) -> None:
        self._stack.append(tuple(values))

    def _take(self, count: int) -> list[Any]:
        """The last so many, off the stack."""
        if len(self._stack) < count:
            raise PickleError("its pickle takes more than it has")
        taken = self._stack[-count:]
        del self._stack[-count:]
        return taken

    def _marked(self) -> list[Any]:
        """All above the last mark, off the stack."""
        taken, self._stack = self._stack, self._below.pop()
        return taken

    def _extend(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], list):
            raise PickleError("its pickle appends to what is no list")
        self._stack[-1].extend(values)

    def _set(self, values: list[Any]) -> None:
        if not isinstance(self._stack[-1], dict) or len(values) % 2:
            raise PickleError("its pickle fills what is no dict")
        self._stack[-1].update(zip(map(_key, values[::2]), values[1::2], strict=True))

    def _made(self, called: Any, arguments: Any) -> Any:
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            raise PickleError("its pickle calls what has no name")
        if called.name in _DICTS:
            pairs = arguments[-1] if arguments and not isinstance(arguments[-1], Name) else ()
            return {_key(key): value for key, value in pairs or ()}
        return self._make(called.name, arguments)


# Of operations without an argument.
_OPERATIONS = {
    "MARK": _Machine.mark,
    "EMPTY_LIST": _Machine.push_list,
    "EMPTY_DICT": _Machine.push_dict,
    "EMPTY_SET": _Machine.push_set,
    "TUPLE": _Machine.marked_tuple,
    "LIST": _Machine.marked_list,
    "DICT": _Machine.marked_dict,
    "FROZENSET": _Machine.marked_frozenset,
    "POP": _Machine.drop,
    "POP_MARK": _Machine.drop_marked,
    "DUP": _Machine.duplicate,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.extend,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "ADDITEMS": _Machine.add_items,
    "STACK_GLOBAL": _Machine.name,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "NEWOBJ_EX": _Machine.call_named,
    "OBJ": _Machine.call_marked,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}


def _known(module: str, name: str) -> Name:
    full = f"{module}.{name}"
    if not _KNOWN.fullmatch(full):
        raise PickleError(
            f"it names {shown(full)}, which no checkpoint needs and nothing here runs"
        )
    return Name(full)


def _key(value: Any) -> Any:
    """A key of a dict: something plain, whose hash takes no time and no depth."""
    if isinstance(value, tuple):
        plain = all(isinstance(part, _PRIMITIVE) for part in value)
    else:
        plain = isinstance(value, (*_PRIMITIVE, Name))
    if not plain:
        raise PickleError("its pickle has a key that is not plain")
    return value
