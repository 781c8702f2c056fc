"""Registry and interface of token mixers, and their construction from a config.

A mixer replaces BERT's self-attention in a layer. It is a frozen dataclass next to its Flax module,
in a file of `models/mixers/` or of another package (`config.model.mixer=PACKAGE.MODULE:CLASS`).
These files load jax, so they are imported only when a mixer is created, after all other checks of a
config.
"""

import dataclasses
import functools
import importlib
import inspect
import typing
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from convbert_jax.config import plugins
from convbert_jax.config.errors import ConfigError, PluginError, UserError
from convbert_jax.config.fields import check_choice

# config.model.mixer -> MODULE:CLASS
MIXERS = {
    "mixed": "convbert_jax.models.mixers.mixed:Mixed",
    "attention": "convbert_jax.models.mixers.attention:Attention",
    "bottleneck": "convbert_jax.models.mixers.attention:Attention",
    "span_dynamic": "convbert_jax.models.mixers.convolution:SpanDynamic",
    "dynamic": "convbert_jax.models.mixers.gated:Dynamic",
    "light": "convbert_jax.models.mixers.gated:Light",
    "dilated": "convbert_jax.models.mixers.gated:Dilated",
    "separable": "convbert_jax.models.mixers.convolution:Separable",
    "short": "convbert_jax.models.mixers.gated:Short",
}

_PLAIN = "convbert_jax.models.mixers.plain"  # wraps an nnx.Module as a mixer
_SPELLINGS = {"true": True, "false": False}
_OWN_TYPES = (int, float, bool, str)


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """Options of attention heads. The defaults are those of BERT.

    Attributes:
      rotary_base: base of rotary positions (Su et al. 2021); 0: none.
      window: a position sees keys at most this many positions away; 0: all.
      qk_norm_epsilon: of RMS norms of each head's queries and keys; 0: no norms.
      key_value_heads: heads of keys and values, shared by equal groups of query heads (Ainslie et
        al. 2023); 0: one per query head.
      biases: whether the projections have biases.
    """

    rotary_base: float = 0.0
    window: int = 0
    qk_norm_epsilon: float = 0.0
    key_value_heads: int = 0
    biases: bool = True


@dataclasses.dataclass(frozen=True)
class MixerSettings:
    """Config fields for the mixer of a stage, of the encoder or of its generator.

    `heads * head_size` is the hidden size; a mixer may use fewer heads.
    """

    names: Mapping[str, str]  # field -> its name in errors, as "config.model.heads"
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
    options: AttentionOptions = AttentionOptions()
    generator_size: float | None = None  # config.generator.size, in a generator
    release_heads: bool = True  # config.generator.release_heads, in a generator

    def all_heads(self) -> int:
        """Returns the nominal heads, for mixers whose heads fill the hidden size.

        Raises:
          ConfigError: head_ratio is set together with this mixer, although it has no effect.
        """
        ratio, names = self.head_ratio, self.names
        together = names["head_ratio"].rpartition(".")[0] == names["mixer"].rpartition(".")[0]
        if together and ratio not in (1, 2):  # 2 is the default, so the user did not set it
            raise ConfigError(
                f"has no effect with {names['mixer']}={self.mixer}, which uses all heads; "
                "set mixer to bottleneck for attention with heads / head_ratio heads, "
                "or leave head_ratio out.",
                field=names["head_ratio"],
                value=ratio,
            )
        return self.heads

    def reduced_heads(self) -> int:
        """Returns heads / head_ratio, at least one, as in the official code.

        Raises:
          ConfigError: head_ratio does not divide the heads.
        """
        in_generator = self.generator_size is not None
        may_be_few = self.heads < self.head_ratio if in_generator else self.heads == 1
        if self.heads % self.head_ratio and not may_be_few:
            ratio = f"{self.names['head_ratio']}={self.head_ratio}"
            if in_generator:
                raise ConfigError(
                    f"gives the generator {self.heads} heads, which are not divisible by {ratio}; "
                    "change config.generator.size.",
                    field="config.generator.size",
                    value=self.generator_size,
                )
            raise ConfigError(
                f"is not divisible by {ratio}; attention and convolution each get "
                "heads / head_ratio heads.",
                field=self.names["heads"],
                value=self.heads,
            )
        return max(1, self.heads // self.head_ratio)


@runtime_checkable
class Mixer(Protocol):
    """Interface of a mixer; `models/mixers/plain.py` wraps an `nnx.Module` class in one.

    A frozen dataclass. `make` sets the fields without a default from the config; a field with the
    name of a field of config.model has the same meaning. Fields with a default are specific to the
    mixer, set by config.model.mixer_fields=NAME=VALUE, and of type int, float, bool or str.

    Attributes:
      RULES: partition rules of the parameters, `placement.Rules` with patterns that match whole
        paths below `mixer/`. Other parameters are partitioned by their last name (kernel, bias,
        scale, embedding, depthwise) as in all layers; any other name is an error.
    """

    RULES: ClassVar[Sequence[tuple[str, Any]]]

    @classmethod
    def make(cls, settings: MixerSettings, **own: Any) -> Self:
        """Creates the mixer from the fields of a config.

        Args:
          own: mixer-specific fields that the config sets.

        Raises:
          ConfigError: the fields are invalid; the message uses the names in `settings.names`.
        """
        ...

    def fields(self, hidden_size: int) -> Mapping[str, Any]:
        """Returns the fields of config.model, except `mixer_fields`, that create this mixer.

        Fields that are missing have no effect on the mixer.

        Raises:
          ConfigError: no config creates this mixer.
        """
        ...

    def module(self, hidden_size: int, initializers, rngs, causal: bool = False):
        """Creates the Flax module: (x [B, L, C], segment_ids [B, L], key, capture) -> [B, L, C].

        `key` and `capture` (`models.layers.Capture`) may be None.

        A causal module reads no later positions and supports incremental decoding, which returns
        the same outputs as the full row:

            state = module.start(rows, length, dtype, copies)  # for up to `length` positions
            out, state = module.step(x, state, places)  # x, out [R, 1, C], places 0, 1, ... [R]

        A prompt is processed at once:

            out, state = module.prefill(x, segment_ids, length, copies)  # x, out [B, P, C]

        Shorter prompts are left-padded with segment 0, which is never read; the state has
        B x `copies` rows. Beam search stores `copies` adjacent rows (beams) per text and reorders
        them: the leaves of the state are arrays with rows as the first axis, or objects with
        `take(rows, axis=0)`.

        Args:
          initializers: `models.layers.Initializers`.
          causal: passed only if true; mixers without a causal form omit this argument, and
            `check_causal` rejects them in a decoder.
        """
        ...

    def products(self, hidden_size: int, length: int) -> float:
        """Matmul FLOPs of a forward pass, per token of a row of `length` tokens, or NaN."""
        ...

    def elementwise(self, hidden_size: int, length: int) -> float:
        """Other FLOPs per token, counted as in the paper (`models.layers.PaperFlops`)."""
        ...

    @property
    def reads_padding(self) -> bool:
        """Whether padding or another document after the last token changes the outputs."""
        ...


def make_mixer(settings: MixerSettings, own: Sequence[str]) -> Mixer:
    """Creates the mixer of a stage.

    Args:
      own: config.model.mixer_fields.

    Raises:
      ConfigError: the name is unknown or not a mixer, or its fields are invalid.
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
        raise PluginError(f"{name} cannot be created ({why}); fix its method make.") from error
    if not isinstance(made, cls):
        raise PluginError(
            f"{name}: make returns a {type(made).__name__}, not an instance of its class; "
            "see convbert_jax/config/mixers.py."
        )
    return made


def check_causal(mixer: Mixer, name: str) -> None:
    """Checks that a mixer can be used in a decoder.

    Args:
      name: field and value for the error message.

    Raises:
      PluginError: the module has no causal form.
    """
    if "causal" not in inspect.signature(type(mixer).module).parameters:
        raise PluginError(
            f"{name} cannot be used in a decoder: its method module has no argument causal. "
            "Choose another mixer, or see convbert_jax/config/mixers.py."
        )


def check_name(name: str, field: str) -> None:
    """Checks, without imports, that a name is in MIXERS or has the form MODULE:CLASS.

    Raises:
      ConfigError: it does not; the message suggests the nearest name.
    """
    if ":" not in name:
        choices = (*MIXERS, "PACKAGE.MODULE:CLASS")
        check_choice(field.removeprefix("config."), name, choices)


def find(name: str, field: str = "config.model.mixer") -> type[Mixer]:
    """Returns the class of a mixer by its name in MIXERS or by MODULE:CLASS.

    Raises:
      PluginError: the user did not allow it, it cannot be imported, or it is not a mixer.
      ConfigError: the name is unknown.
    """
    check_name(name, field)
    if name not in MIXERS:
        plugins.check_allowed(name, field)  # outside of the cached function: checked on each call
    return _find(name, field)


@functools.lru_cache
def _find(name: str, field: str) -> type[Mixer]:
    if name in MIXERS:
        module, _, attribute = MIXERS[name].partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:  # jax or flax is broken, for example by an environment variable
            raise PluginError(
                f"cannot be imported ({plugins.first_line(error)}); check the output of `python -c "
                "'import jax, flax'`.",
                field=field,
                value=name,
            ) from error
    cls = importlib.import_module(_PLAIN).wrap(plugins.load(name, field))
    _check_class(cls, f"{field}={name}")
    plugins.allow([_place(cls)])  # the name that `describe` returns
    return cls


def is_same(first: str, second: str) -> bool:
    """Returns whether two names refer to one mixer, which a package may export under two names.

    Two names in MIXERS always differ, although attention and bottleneck share a class.

    Raises:
      ConfigError: as `find`.
    """
    return first == second or _first_name(first) == _first_name(second)


def _first_name(name: str) -> Any:
    """Returns the name in MIXERS, or the class of a mixer that is not there."""
    if name in MIXERS:
        return name
    cls = find(name)
    return next((known for known, place in MIXERS.items() if place == _place(cls)), cls)


def _place(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def describe(mixer: Mixer, hidden_size: int) -> dict[str, Any]:
    """Returns the fields of config.model that create a mixer, including `mixer_fields`.

    Raises:
      ConfigError: no config creates this mixer.
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
    """Returns config.model.heads for heads of `head_size` channels.

    Raises:
      ConfigError: the hidden size is not divisible by `head_size`.
    """
    if hidden_size % head_size:
        raise ConfigError(
            f"a hidden size of {hidden_size} is not divisible by the head size {head_size}; a "
            "config cannot describe this encoder."
        )
    return hidden_size // head_size


def change(mixer: Mixer, **fields: Any) -> Mixer:
    """Returns `mixer` with `fields` replaced, except mixer-specific fields and unknown ones."""
    has = {field.name for field in dataclasses.fields(mixer)} - {f.name for f in _own(type(mixer))}
    return dataclasses.replace(
        mixer, **{name: value for name, value in fields.items() if name in has}
    )


def _check_class(cls: Any, name: str) -> None:
    """Raises PluginError if the class does not have the interface of `Mixer`."""
    kept = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    has = {field.name for field in dataclasses.fields(cls)} if kept else set()
    lacks = [asked for asked in _required() if asked not in has and not hasattr(cls, asked)]
    if not kept or not cls.__dataclass_params__.frozen:
        lacks.append("dataclasses.dataclass(frozen=True)")
    if lacks:
        raise PluginError(
            f"{name} is not a mixer: missing {', '.join(lacks)}. See convbert_jax/config/mixers.py."
        )
    try:
        types = typing.get_type_hints(cls)
    except Exception as error:
        why = plugins.first_line(error)
        raise PluginError(f"{name} has an undefined type annotation ({why}).") from error
    for field in _own(cls):
        if types[field.name] not in _OWN_TYPES or field.default is dataclasses.MISSING:
            raise PluginError(
                f"{name}: mixer-specific field {field.name} has type "
                f"{getattr(types[field.name], '__name__', types[field.name])}; use int, float, "
                "bool or str with a default."
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
            has = f"its fields are {', '.join(types)}" if types else "it has no specific fields"
            raise PluginError(
                f"is not a field of the mixer {mixer}; {has}. Write NAME=VALUE.",
                field=field,
                value=text,
            )
        if name in values:
            raise ConfigError(f"sets {name} twice; remove one.", field=field)
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
