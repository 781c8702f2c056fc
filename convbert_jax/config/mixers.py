"""Token mixers as a config knows them: their names, what a specification must say, and how one is
made from the fields of a config.

A mixer stands in a layer where BERT has its self-attention. It is a frozen dataclass beside its
Flax module, in one file of `models/mixers/` or of anybody's package, which
`config.model.mixer=PACKAGE.MODULE:CLASS` names. These files load jax, so they are imported when a
mixer is made, after every other check of a config.
"""

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from convbert_jax.config.checks import plugins
from convbert_jax.config.checks.rules import check_choice
from convbert_jax.config.errors import ConfigError, PluginError, UserError

# config.model.mixer -> MODULE:CLASS
MIXERS = {
    "mixed": "convbert_jax.models.mixers.mixed:Mixed",
    "attention": "convbert_jax.models.mixers.attention:Attention",
    "bottleneck": "convbert_jax.models.mixers.attention:Attention",
    "span_dynamic": "convbert_jax.models.mixers.span_dynamic:SpanDynamic",
    "dynamic": "convbert_jax.models.mixers.dynamic:Dynamic",
    "light": "convbert_jax.models.mixers.light:Light",
    "dilated": "convbert_jax.models.mixers.dilated:Dilated",
    "separable": "convbert_jax.models.mixers.separable:Separable",
}

_PLAIN = "convbert_jax.models.mixers.plain"  # makes a mixer of an nnx.Module
_SPELLINGS = {"true": True, "false": False}
_OWN_TYPES = (int, float, bool, str)


@dataclasses.dataclass(frozen=True)
class MixerSettings:
    """What a config says to the mixer of a stage, of the encoder or of its generator.

    `heads * head_size` is the hidden size; how many heads a mixer has of it is its own affair.
    """

    names: Mapping[str, str]  # of these settings, as errors call them: "config.model.heads"
    mixer: str
    heads: int
    head_size: int
    head_ratio: int
    kernel_size: int
    dilation: int
    attention_dropout: float
    attention: str
    convolution: str
    mask_convolution: bool
    generator_size: float | None = None  # config.generator.size, in a generator
    release_heads: bool = True  # config.generator.release_heads, in a generator

    def all_heads(self) -> int:
        """The nominal heads, of a mixer whose heads fill the hidden size.

        Raises:
          ConfigError: head_ratio is set where the mixer is, and does nothing.
        """
        ratio, names = self.head_ratio, self.names
        together = names["head_ratio"].rpartition(".")[0] == names["mixer"].rpartition(".")[0]
        if together and ratio not in (1, 2):  # 2 is the default, nobody set it
            raise ConfigError(
                f"does nothing with {names['mixer']}={self.mixer}, which has all heads; "
                "set mixer to bottleneck for heads / head_ratio heads of attention "
                "alone, or leave head_ratio out.",
                field=names["head_ratio"],
                value=ratio,
            )
        return self.heads

    def reduced_heads(self) -> int:
        """heads / head_ratio; one where fewer heads than that are left, as in the release.

        Raises:
          ConfigError: head_ratio does not divide the heads.
        """
        in_generator = self.generator_size is not None
        may_be_few = self.heads < self.head_ratio if in_generator else self.heads == 1
        if self.heads % self.head_ratio and not may_be_few:
            ratio = f"{self.names['head_ratio']}={self.head_ratio}"
            if in_generator:
                raise ConfigError(
                    f"leaves the generator {self.heads} heads, which {ratio} does not "
                    "divide; change config.generator.size.",
                    field="config.generator.size",
                    value=self.generator_size,
                )
            raise ConfigError(
                f"is not divisible by {ratio}; attention (and convolution as much) gets "
                "heads / head_ratio heads.",
                field=self.names["heads"],
                value=self.heads,
            )
        return max(1, self.heads // self.head_ratio)


@runtime_checkable
class Mixer(Protocol):
    """What all code but the mixer's own may ask of a mixer; of an `nnx.Module` class
    `models/mixers/plain.py` makes one.

    A frozen dataclass. Fields without a default follow from the config, by `make`; those that are
    called like a field of config.model mean the same. Fields with a default are the mixer's own,
    set by config.model.mixer_fields=NAME=VALUE, and of type int, float, bool or str.

    Attributes:
      RULES: how its parameters may be divided over devices, `placement.Rules` with patterns
        that match whole paths below `mixer/`. Without one a parameter is divided as those of all
        layers are by its last name (kernel, bias, scale, embedding); another name is an error.
      FAMILIES: of `interop/tables.py` FAMILIES, whose models have this mixer; () is none.
      NAMES: module below `mixer/` -> (kind of `interop/tables.py` KINDS, Hugging Face's name,
        TensorFlow's), both inside of one layer.
    """

    RULES: ClassVar[Sequence[tuple[str, Any]]]
    FAMILIES: ClassVar[tuple[str, ...]]
    NAMES: ClassVar[Mapping[str, tuple[str, str, str]]]

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> Self:
        """The mixer that a config describes.

        Args:
          own: the mixer's own fields that the config sets.

        Raises:
          ConfigError: it cannot be, in one sentence with the names of `settings.names`.
        """
        ...

    def fields(self, hidden_size: int) -> Mapping[str, Any]:
        """The way back: fields of config.model, but for `mixer_fields`, that make this mixer; those
        that are not there have no effect on it.

        Raises:
          ConfigError: no config makes it.
        """
        ...

    def module(self, hidden_size: int, initializers, rngs, causal: bool = False):
        """The Flax module: (x [B, L, C], segment_ids [B, L], key, capture) -> [B, L, C]; the
        latter two may be None (`models/capture.py`).

        A causal one reads nothing behind a position, and makes rows one position at a time:

            state = module.start(rows, length, dtype, copies)  # of up to `length` positions
            out, state = module.step(x, state, places)  # x, out [R, 1, C], places 0, 1, ... [R]

        which is what it gives out for the row as a whole. What is given of rows is read at once,

            out, state = module.prefill(x, segment_ids, length, copies)  # x, out [B, P, C]

        with padding, segment 0, in front of shorter ones, which is never read; the state is of
        B x `copies` rows. A beam search puts its rows, `copies` of each text side by side, in
        another order: the state is a pytree of arrays with an axis of rows first, or of what has
        their `take(rows, axis=0)`.

        Args:
          initializers: `models.layers.Initializers`.
          causal: given where it is to be true; a mixer that cannot be leaves it out, and
            `check_causal` refuses it in a decoder.
        """
        ...

    def products(self, hidden_size: int, length: int) -> float:
        """FLOPs of matrix products of a forward pass, per token of a row of `length`, or NaN."""
        ...

    def elementwise(self, hidden_size: int, length: int) -> float:
        """The other FLOPs, as the paper counts them, with the weights of `models/costs.py`."""
        ...

    @property
    def reads_padding(self) -> bool:
        """Whether what follows the last token, padding or another document, changes outputs."""
        ...

    def inexpressible(self, form: str, hidden_size: int) -> str:
        """Why other software cannot compute it, and the way out; "" if it can.

        Args:
          form: "huggingface", its classes, or "tensorflow1", the official code.
        """
        ...


def make_mixer(settings: MixerSettings, own: Sequence[str]) -> Mixer:
    """The mixer of a stage.

    Args:
      own: config.model.mixer_fields.

    Raises:
      ConfigError: nobody knows the name, it names no mixer, or its fields cannot work.
    """
    name = f"{settings.names['mixer']}={settings.mixer}"
    cls = find(settings.mixer, settings.names["mixer"])
    values = _parse_own(cls, own, settings.names["mixer_fields"], settings.mixer)
    try:
        made = cls.make(settings, **values)
        hash(made)
    except UserError:
        raise
    except Exception as error:
        why = plugins.first_line(error)
        raise PluginError(f"{name} cannot be made ({why}); mend its make.") from error
    if not isinstance(made, cls):
        raise PluginError(
            f"{name} makes a {type(made).__name__}, not itself; see convbert_jax/config/mixers.py."
        )
    return made


def check_causal(mixer: Mixer, name: str) -> None:
    """Refuses a mixer that cannot stand in a decoder.

    Args:
      name: the field and its value, as the error calls it.

    Raises:
      PluginError: its module has no causal form.
    """
    if "causal" not in inspect.signature(type(mixer).module).parameters:
        raise PluginError(
            f"{name} has no causal form, which a decoder needs: its module takes no argument "
            "causal; take another mixer, or see convbert_jax/config/mixers.py."
        )


def check_name(name: str, field: str) -> None:
    """Refuses a name that is neither in MIXERS nor MODULE:CLASS; imports nothing.

    Raises:
      ConfigError: with the nearest name.
    """
    if ":" not in name:
        choices = (*MIXERS, "PACKAGE.MODULE:CLASS")
        check_choice(field.removeprefix("config."), name, choices)


def find(name: str, field: str = "config.model.mixer") -> type[Mixer]:
    """Returns the class of a mixer, by its name in MIXERS or by MODULE:CLASS.

    Raises:
      PluginError: the user did not name it, it cannot be imported, or it is not a mixer.
      ConfigError: the name is unknown.
    """
    check_name(name, field)
    if name not in MIXERS:
        plugins.check_allowed(name, field)  # also of what is in the cache
    return _find(name, field)


@functools.lru_cache
def _find(name: str, field: str) -> type[Mixer]:
    if name in MIXERS:
        module, _, attribute = MIXERS[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # what a mixer is built on is broken, as by a variable
            raise PluginError(
                f"cannot be imported ({plugins.first_line(error)}); see what `python -c "
                "'import jax, flax'` says here.",
                field=field,
                value=name,
            ) from error
    cls = importlib.import_module(_PLAIN).wrap(plugins.load(name, field))
    _check_class(cls, f"{field}={name}")
    plugins.allow([_place(cls)])  # as `describe` calls it
    return cls


def is_same(first: str, second: str) -> bool:
    """Whether two names are of one mixer, under which a package may export it twice; names of
    MIXERS are not, though attention and bottleneck have one class.

    Raises:
      ConfigError: as `find`.
    """
    return first == second or _first_name(first) == _first_name(second)


def _first_name(name: str) -> Any:
    """A name of MIXERS, or the class of what is not there."""
    if name in MIXERS:
        return name
    cls = find(name)
    return next((known for known, place in MIXERS.items() if place == _place(cls)), cls)


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def describe(mixer: Mixer, hidden_size: int) -> dict[str, Any]:
    """The fields of config.model that make a mixer, those of its own too.

    Raises:
      ConfigError: no config makes it.
    """
    cls = type(mixer)
    place = _place(cls)
    names = [name for name, value in MIXERS.items() if value == place]
    own = tuple(
        f"{field.name}={_spell(getattr(mixer, field.name))}"
        for field in _own(cls)
        if getattr(mixer, field.name) != field.default
    )
    return {"mixer": names[0] if names else place, "mixer_fields": own, **mixer.fields(hidden_size)}


def nominal_heads(hidden_size: int, head_size: int) -> int:
    """config.model.heads for heads of `head_size` channels.

    Raises:
      ConfigError: they do not divide the hidden size.
    """
    if hidden_size % head_size:
        raise ConfigError(
            f"heads of {head_size} channels do not divide a hidden size of {hidden_size}; such an "
            "encoder cannot be put into a run."
        )
    return hidden_size // head_size


def change(mixer: Mixer, **fields: Any) -> Mixer:
    """`mixer` with those of `fields` changed that it takes from the config; its own stay."""
    has = {field.name for field in dataclasses.fields(mixer)} - {f.name for f in _own(type(mixer))}
    return dataclasses.replace(
        mixer, **{name: value for name, value in fields.items() if name in has}
    )


def _check_class(cls: Any, name: str) -> None:
    """Raises PluginError for what is no `Mixer`, as far as its class tells."""
    kept = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    has = {field.name for field in dataclasses.fields(cls)} if kept else set()
    lacks = [asked for asked in _required() if asked not in has and not hasattr(cls, asked)]
    if not kept or not cls.__dataclass_params__.frozen:
        lacks.append("dataclasses.dataclass(frozen=True)")
    if lacks:
        raise PluginError(
            f"{name} is no mixer, it lacks {', '.join(lacks)}; see convbert_jax/config/mixers.py."
        )
    try:
        types = typing.get_type_hints(cls)
    except Exception as error:
        why = plugins.first_line(error)
        raise PluginError(f"{name} has a type that is not there ({why}).") from error
    for field in _own(cls):
        if types[field.name] not in _OWN_TYPES or field.default is dataclasses.MISSING:
            raise PluginError(
                f"{name} has the field {field.name} of its own, of type "
                f"{getattr(types[field.name], '__name__', types[field.name])}; make it an int, "
                "float, bool or str with a default."
            )


def _own(cls) -> list[dataclasses.Field]:
    """Fields with a default."""
    missing = dataclasses.MISSING
    return [
        field
        for field in dataclasses.fields(cls)
        if field.default is not missing or field.default_factory is not missing
    ]


def _parse_own(cls, texts: Sequence[str], field: str, mixer: str) -> dict[str, Any]:
    kinds, values = typing.get_type_hints(cls), {}
    types = {own.name: kinds[own.name] for own in _own(cls)}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or name not in types:
            has = f"its fields are {', '.join(types)}" if types else "it has no fields of its own"
            raise PluginError(
                f"is no field of the mixer {mixer}; {has}; write NAME=VALUE.",
                field=field,
                value=text,
            )
        if name in values:
            raise ConfigError(f"names {name} twice; leave one out.", field=field)
        values[name] = _parse(value, types[name], f"{field}={text}")
    return values


def _parse(value: str, kind: type, name: str):
    try:
        return _SPELLINGS[value.lower()] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ConfigError(f"must be of type {kind.__name__}.", field=name) from None


def _spell(value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _required() -> list[str]:
    return sorted(name for name in vars(Mixer) if not name.startswith("_")) + list(
        Mixer.__annotations__
    )
