"""Teachers in pre-training: any weights that can be read, checked against the student before
anything is prepared, and known again by a checksum.
"""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convbert_jax import files
from convbert_jax.config import (
    Config,
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    UserError,
    from_config_dict,
    mixers,
    to_dict,
)
from convbert_jax.data.tokenizer.tokenizer import load_tokenizer
from convbert_jax.interfaces.placement import Rules
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.modules import modules
from convbert_jax.interop.networks import Network, stack, to_tree
from convbert_jax.interop.runs import vocabulary
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.mixers import sharding_rules
from convbert_jax.objectives import distillation
from convbert_jax.training.task import Params
from convbert_jax.workdir import Workdir

# recipe -> (head that a teacher's logits are of, what it is called)
_HEADS = {
    "masked_lm": ("mlm_head", "masked language"),
    "replaced_token": ("rtd_head", "discriminator's"),
}
# A teacher computes as this machine does best, and drops nothing.
_HERE = {"attention": "auto", "convolution": "auto", "attention_dropout": 0.0}
_ROOT = "teacher"


class TeacherError(UserError):
    """A teacher that cannot teach this student."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A network that is only read.

    Attributes:
      params: as `Task.frozen` has them, under one root.
      encoder: what it computes with them.
      checksum: of weights and encoder, wherever they lie.
    """

    network: Network
    params: Params
    encoder: EncoderConfig
    graphdef: nnx.GraphDef
    checksum: str

    @property
    def embeddings(self) -> EmbeddingsConfig:
        return self.network.embeddings

    @property
    def rules(self) -> Rules:
        """Of its parameters alone, before those of the student."""
        return tuple((f"^{_ROOT}/.*{rule}", split) for rule, split in sharding_rules(self.encoder))

    def over(self, params: Params, config: Config) -> distillation.Teacher:
        """What an objective asks, of the traced `params`."""
        params = jax.lax.stop_gradient(params[_ROOT])
        parts = nnx.merge(self.graphdef, params)

        def teach(tokens, segment_ids, type_ids, *, dtype):
            x = parts["embeddings"](tokens, segment_ids, type_ids, dtype=dtype)
            encode = functools.partial(parts["encoder"], x, segment_ids)
            hidden, seen = distillation.observe(config.distillation, self.encoder, encode, x)

            def head(positions):
                if positions is None:
                    return parts["rtd_head"](hidden)
                picked = jnp.take_along_axis(hidden, positions[..., None], axis=1)
                return parts["mlm_head"](picked, parts["embeddings"])

            return seen, head

        return teach


def follow(config: Config, workdir: Workdir, given: Collection[str]) -> Config:
    """`config` with the vocabulary and the widths of its teacher, or with those that a run which
    has begun took of it.

    Raises:
      TeacherError: the teacher has another vocabulary; ConversionError: it cannot be read.
    """
    teacher, begun = config.distillation.teacher, workdir.is_bound()
    if begun and workdir.teacher.exists() and not teacher:
        raise TeacherError(
            f"--workdir={workdir} holds a run that has a teacher; name it with "
            "--config.distillation.teacher, or another --workdir.",
            field="config.distillation.teacher",
            path=workdir.path,
        )
    if begun and teacher and not workdir.teacher.exists():
        raise TeacherError(
            f"--workdir={workdir} holds a run that began without a teacher; unset "
            "config.distillation.teacher, or name another --workdir.",
            field="config.distillation.teacher",
            path=workdir.path,
        )
    if not teacher:
        return config
    if begun and workdir.config.exists():
        kept = vocabulary.use_copies(workdir, workdir.read_config())
        names = ("teacher_hidden_size", "teacher_embedding_size")
        fields = {f"distillation.{name}": getattr(kept.distillation, name) for name in names}
        if not config.tokenizer.path:
            section = dataclasses.asdict(kept.tokenizer)
            fields |= {f"tokenizer.{name}": value for name, value in section.items()}
    else:
        source = sources.read_source(teacher)
        main = source.networks["main"]
        fields = {
            "distillation.teacher_hidden_size": main.encoder.hidden_size,
            "distillation.teacher_embedding_size": main.embeddings.size,
        }
        with _named(config):
            importing.check_entries(source, config)
            fields |= importing.tokenizer_fields(source, config, given)
    fields = {path: value for path, value in fields.items() if path not in given}
    return from_config_dict(to_dict(matching.replace(config, fields)))


def open_teacher(config: Config) -> Teacher | None:
    """The teacher of `config` as `follow` gives it, None without one.

    Raises:
      TeacherError: it cannot teach this student; ConversionError: it cannot be read.
    """
    d = config.distillation
    if not d.teacher:
        return None
    source = sources.read_source(d.teacher)
    network = source.networks["main"]
    with _named(config):
        importing.check_vocabulary(source, load_tokenizer(config.tokenizer, Path()))
    encoder = _here(network.encoder)
    head, called = _HEADS[config.recipe]
    _check_sizes(config, network)
    if d.logits_weight and not network.has(head):
        raise _error(
            config,
            f"has no {called} head, whose logits config.recipe='{config.recipe}' would learn; set "
            "config.distillation.logits_weight=0 and another weight above it, or name another "
            "teacher",
            field="config.distillation.logits_weight",
        )
    outputs = {head: 1} if d.logits_weight else {}
    parts = ("embeddings/", "encoder/", *(f"{name}/" for name in outputs))
    flat = stack(network.parameters, encoder)
    flat = {path: leaf for path, leaf in flat.items() if path.startswith(parts)}
    graphdef = nnx.graphdef(modules(network.embeddings, encoder, outputs))
    teacher = Teacher(network, {_ROOT: to_tree(flat)}, encoder, graphdef, _checksum(network))
    _check_layers(config, encoder)
    return teacher


def bind(workdir: Workdir, config: Config, teacher: Teacher | None, *, writer: bool) -> None:
    """Keeps which teacher a run has, from its first start on.

    Raises:
      TeacherError: the run has begun with other weights.
    """
    place = workdir.teacher
    if not workdir.is_bound():
        if writer and teacher:
            files.write_json(place, {"checksum": teacher.checksum})
        elif writer and place.exists():  # of a start that came to nothing
            place.unlink()
    elif teacher:
        remedy = "restore it, or start again in another --workdir"
        kept = files.read_json(place, remedy=remedy, fields={"checksum": str})["checksum"]
        if kept != teacher.checksum:
            raise TeacherError(
                f"--workdir={workdir} holds a run that began with another teacher, now it is "
                f"config.distillation.teacher={config.distillation.teacher}; name the same "
                "weights, or another --workdir.",
                field="config.distillation.teacher",
                value=config.distillation.teacher,
                path=workdir.path,
            )


def start_of(config: Config, teacher: Teacher) -> sources.Source:
    """The teacher's layers as a student of `config` starts with them
    (config.distillation.initialize).

    Raises:
      TeacherError: a layer is of another mixer, or layers or embeddings of other sizes.
    """
    rule = config.distillation.layers
    theirs, ours = _layers(teacher.network.encoder), _layers(config.encoder)
    of_teacher = teacher.network.parameters
    flat = {path: leaf for path, leaf in of_teacher.items() if not path.startswith("layers/")}
    for student, taken in distillation.pairs(
        "uniform" if rule == "last" else rule, len(ours), len(theirs)
    ):
        if _sizes(ours[student]) != _sizes(theirs[taken]):
            raise _error(
                config,
                f"has as layer {taken + 1} {_spell(theirs[taken])}, and layer {student + 1} of the "
                f"student, which would start with it, is {_spell(ours[student])}; make them the "
                "same, or set config.distillation.initialize=false",
                field="config.distillation.initialize",
            )
        prefix = f"layers/{taken}/"
        for path, leaf in of_teacher.items():
            if path.startswith(prefix):
                flat[f"layers/{student}/{path.removeprefix(prefix)}"] = leaf
    if config.embeddings.size != teacher.network.embeddings.size:
        raise _error(
            config,
            f"has embeddings of {teacher.network.embeddings.size} channels and the student has "
            f"config.model.embedding_size={config.embeddings.size}; make them equal, or unset "
            "config.distillation.initialize",
            field="config.model.embedding_size",
            value=config.embeddings.size,
        )
    main = dataclasses.replace(teacher.network, encoder=config.encoder, parameters=flat)
    source = sources.Source("run", {"main": main})
    with _named(config):
        sources.check_fits(source, config)
    return source


def _here(encoder: EncoderConfig) -> EncoderConfig:
    stages = tuple(
        dataclasses.replace(
            stage,
            layer=dataclasses.replace(
                stage.layer, mixer=mixers.change(stage.layer.mixer, **_HERE), dropout=0.0
            ),
        )
        for stage in encoder.stages
    )
    return dataclasses.replace(encoder, stages=stages, remat="none", scan_unroll=1)


def _check_sizes(config: Config, network: Network) -> None:
    d, table = config.distillation, network.embeddings
    for name, found, kept in (
        ("hidden", network.encoder.hidden_size, d.teacher_hidden_size),
        ("embedding", table.size, d.teacher_embedding_size),
    ):
        if found != kept:
            raise _error(
                config,
                f"has a {name} size of {found}, and the run began with a teacher of {kept}; name "
                "that one, or another --workdir",
            )
    if table.vocab_size != config.tokenizer.vocab_size:
        raise _error(
            config,
            f"has a vocabulary of {table.vocab_size}, the student has "
            f"config.tokenizer.vocab_size={config.tokenizer.vocab_size}; leave that field out",
            field="config.tokenizer.vocab_size",
            value=config.tokenizer.vocab_size,
        )
    if table.positions < config.data.length:
        raise _error(
            config,
            f"reads {table.positions} tokens at most and config.data.length={config.data.length}; "
            "shorten the rows",
            field="config.data.length",
            value=config.data.length,
        )
    if table.types < 2 and config.data.layout != "packed":
        raise _error(
            config,
            f"has one segment type and config.data.layout='{config.data.layout}' marks two; set "
            "config.data.layout=packed",
            field="config.data.layout",
            value=config.data.layout,
        )
    if network.encoder.reads_padding and config.data.layout == "packed":
        raise _error(
            config,
            "reads what follows a document, and config.data.layout='packed' puts another one "
            "there; set config.data.layout=electra",
            field="config.data.layout",
            value=config.data.layout,
        )


def _check_layers(config: Config, encoder: EncoderConfig) -> None:
    """Which layers are compared, and whether they have what is compared."""
    d = config.distillation
    ours, theirs = _layers(config.encoder), _layers(encoder)
    if (d.layers != "last" or d.initialize) and len(ours) > len(theirs):
        raise _error(
            config,
            f"has {len(theirs)} layers, fewer than the {len(ours)} of the student; set "
            "config.distillation.layers=last and initialize=false, or config.model.layers lower",
            field="config.model.layers",
        )
    if not d.attention_weight:
        return
    name = distillation.ATTENTION[d.attention][0]
    student, teacher = (_count_heads(e, name) for e in (config.encoder, encoder))
    compared = [
        (student[i], teacher[j]) for i, j in distillation.pairs(d.layers, len(ours), len(theirs))
    ]
    found = [pair for pair in compared if all(pair)]
    if not found:
        heads = ", ".join(f"{a} and {b}" for a, b in compared)
        raise _error(
            config,
            "has no attention to compare: the layers of student and teacher that would be have "
            f"{heads} heads of attention; set config.distillation.attention_weight=0",
            field="config.distillation.attention_weight",
        )
    differ = next((pair for pair in found if pair[0] != pair[1]), None)
    if d.attention == "scores" and differ:
        raise _error(
            config,
            f"has {differ[1]} attention heads where the student has {differ[0]}, and "
            "config.distillation.attention='scores' compares them one by one; set it to maps",
            field="config.distillation.attention",
            value=d.attention,
        )


def _count_heads(encoder: EncoderConfig, name: str) -> list[int]:
    """Of each layer, those that it hands out as `name`; 0 for one that does not."""

    def run():
        x = jnp.zeros((1, 8, encoder.embedding_size))
        return Encoder(encoder, nnx.Rngs(0))(x, jnp.ones((1, 8), jnp.int32), capture=name)[1]

    try:
        seen = jax.eval_shape(run)
    except ValueError:  # no layer has any
        return [0] * encoder.depth
    counts = []
    for stage, found in zip(encoder.stages, seen, strict=True):
        counts += [found[name].shape[2] if name in found else 0] * stage.depth
    return counts


def _layers(encoder: EncoderConfig):
    return [stage.layer for stage in encoder.stages for _ in range(stage.depth)]


def _sizes(layer: LayerConfig) -> tuple:
    """What decides the shapes of a layer and what it computes."""
    mixer = mixers.change(layer.mixer, **_HERE, mask_convolution=True)
    return mixer, layer.hidden_size, layer.ffn_size, layer.ffn_groups


def _spell(layer: LayerConfig) -> str:
    mixer, hidden, ffn, groups = _sizes(layer)
    return f"{type(mixer).__name__} ({mixer}) on {hidden} channels, feed-forward {ffn} / {groups}"


def _checksum(network: Network) -> str:
    digest = hashlib.sha256(repr((network.embeddings, _here(network.encoder))).encode())
    for path, leaf in sorted(network.parameters.items()):
        leaf = np.ascontiguousarray(leaf)
        digest.update(f"{path} {leaf.dtype} {leaf.shape}".encode())
        digest.update(leaf.reshape(-1).view(np.uint8))
    return digest.hexdigest()


@contextlib.contextmanager
def _named(config: Config) -> Iterator[None]:
    """Errors about what lies beside the teacher name the teacher."""
    try:
        yield
    except UserError as error:
        teacher = config.distillation.teacher
        raise TeacherError(
            f"config.distillation.teacher={teacher}: {error}",
            field=error.field or "config.distillation.teacher",
            value=error.value if error.field else teacher,
            path=error.path,
            line=error.line,
        ) from error


def _error(config: Config, what: str, field: str = "", value: Any = None) -> TeacherError:
    """An error about the teacher; `field` is another one that can mend it, with its value."""
    teacher = config.distillation.teacher
    return TeacherError(
        f"config.distillation.teacher={teacher} {what}.",
        field=field or "config.distillation.teacher",
        value=value if field else teacher,
    )
