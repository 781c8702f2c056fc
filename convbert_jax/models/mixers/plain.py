"""Wraps a plain `nnx.Module` class as a mixer, with defaults for the rest of the interface."""

import dataclasses
import functools
import inspect
import math
from typing import Any, ClassVar

from flax import nnx

from convbert_jax.config import PluginError
from convbert_jax.interfaces import REPLICATED

# __init__ arguments that the model and the config provide.
_OF_MODEL = ("hidden_size", "rngs")
_OF_CONFIG = {"heads": int, "head_ratio": int, "kernel_size": int, "dilation": int}
_OF_USER = (bool, int, float, str)  # types of arguments that config.model.mixer_fields can set


class Plain:
    """Base of mixers made by `wrap`: NaN FLOPs, replicated parameters, no export."""

    RULES = ((r".*", REPLICATED),)
    MODULE: ClassVar[type[nnx.Module]]

    @classmethod
    def make(cls, settings, **own: Any):
        given = {field.name for field in dataclasses.fields(cls)} & _OF_CONFIG.keys()
        return cls(**{name: getattr(settings, name) for name in given}, **own)

    def fields(self, hidden_size: int) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in _OF_CONFIG}

    def module(self, hidden_size: int, initializers, rngs: nnx.Rngs) -> nnx.Module:
        return _Called(self.MODULE(hidden_size=hidden_size, rngs=rngs, **vars(self)))

    def products(self, hidden_size: int, length: int) -> float:
        return math.nan

    def elementwise(self, hidden_size: int, length: int) -> float:
        return math.nan

    @property
    def reads_padding(self) -> bool:
        return "segment_ids" not in _parameters(self.MODULE.__call__)


class _Called(nnx.Module):
    """Calls a module with those arguments that its signature declares."""

    def __init__(self, module: nnx.Module):
        self.module = module

    def __call__(self, x, segment_ids, key=None, capture=None):
        offered = {"segment_ids": segment_ids, "key": key}
        taken = offered.keys() & _parameters(type(self.module).__call__).keys()
        out = self.module(x, **{name: offered[name] for name in taken})
        return out.astype(x.dtype)  # float32 parameters promote a bfloat16 input


def wrap(cls: Any) -> Any:
    """Wrap an `nnx.Module` class as a mixer; return any other object unchanged.

    Raises:
      PluginError: Its __init__ requires an argument that a model cannot provide.
    """
    return _wrap(cls) if isinstance(cls, type) and issubclass(cls, nnx.Module) else cls


@functools.lru_cache
def _wrap(cls: type[nnx.Module]) -> type[Plain]:
    arguments = _parameters(cls.__init__)
    required, own = [], []
    for argument, parameter in list(arguments.items())[1:]:
        if argument in _OF_CONFIG:
            required.append((argument, _OF_CONFIG[argument]))
        elif type(parameter.default) in _OF_USER:
            own.append((argument, type(parameter.default), parameter.default))
        elif argument not in _OF_MODEL:
            raise PluginError(
                f"{cls.__module__}:{cls.__qualname__}: the __init__ argument {argument} has no "
                f"supported default. Use {', '.join((*_OF_MODEL, *_OF_CONFIG))}, or a default of "
                "type bool, int, float or str."
            )
    if missing := [argument for argument in _OF_MODEL if argument not in arguments]:
        raise PluginError(
            f"{cls.__module__}:{cls.__qualname__}: __init__ has no argument {missing[0]}; add it."
        )
    made = dataclasses.make_dataclass(
        cls.__name__, [*required, *own], bases=(Plain,), frozen=True, namespace={"MODULE": cls}
    )
    made.__module__, made.__qualname__ = cls.__module__, cls.__qualname__
    return made


def _parameters(function) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(function).parameters)
