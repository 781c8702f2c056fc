"""Teachers for distillation in pre-training.

A teacher is any readable set of weights. It is checked against the student before data is prepared,
and its checksum is kept so that a resumed run uses the same teacher.
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

from convbert_jax import storage
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
from convbert_jax.interfaces import Rules
from convbert_jax.interop import importing, matching, sources
from convbert_jax.interop.networks import Network, make_modules, places, stack, to_tree
from convbert_jax.models.encoder import Encoder
from convbert_jax.models.networks import sharding_rules
from convbert_jax.objectives import distillation
from convbert_jax.training.partitioning import Params
from convbert_jax.workdir import Workdir

# recipe -> (head that computes the teacher's logits, its name in messages)
_HEADS = {"mlm_head": "masked language", "rtd_head": "discriminator's"}
# The teacher uses the fastest implementation on this machine and no dropout.
_HERE = {"attention": "auto", "convolution": "auto", "attention_dropout": 0.0}
_ROOT = "teacher"


class TeacherError(UserError):
    """A teacher that does not match the student."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen network.

    Attributes:
      params: parameters for `Task.frozen`, under one root key.
      encoder: encoder config used for the computation.
      checksum: SHA-256 of weights and configs, independent of their path.
      head: the head whose logits are compared, "mlm_head" or "rtd_head"; "" for none.
    """

    network: Network
    params: Params
    encoder: EncoderConfig
    graphdef: nnx.GraphDef
    checksum: str
    head: str

    @property
    def embeddings(self) -> EmbeddingsConfig:
        return self.network.embeddings

    @property
    def rules(self) -> Rules:
        """Sharding rules of the teacher's parameters, matched before the student's rules."""
        return tuple((f"^{_ROOT}/.*{rule}", split) for rule, split in sharding_rules(self.encoder))

    def over(self, params: Params, config: Config) -> distillation.Teacher:
        """Returns the teacher function for an objective, with traced `params`.

        The function is (tokens, segment_ids, type_ids, *, dtype) -> (captured values, head), where
        head(positions) computes logits.
        """
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
    """Takes vocabulary and widths from the teacher, or from the kept config of a resumed run.

    Raises:
      TeacherError: the teacher has another vocabulary.
      ConversionError: the teacher cannot be read.
    """
    teacher, begun = config.distillation.teacher, workdir.is_bound()
    if begun and workdir.teacher.exists() and not teacher:
        raise TeacherError(
            f"Cannot resume: the run in --workdir={workdir} began with a teacher. Set "
            "--config.distillation.teacher, or use another --workdir.",
            field="config.distillation.teacher",
            path=workdir.path,
        )
    if begun and teacher and not workdir.teacher.exists():
        raise TeacherError(
            f"Cannot resume: the run in --workdir={workdir} began without a teacher. Unset "
            "config.distillation.teacher, or use another --workdir.",
            field="config.distillation.teacher",
            path=workdir.path,
        )
    if not teacher:
        return config
    if begun and workdir.config.exists():
        kept = sources.use_copies(workdir, workdir.read_config())
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
    """Reads the teacher of a config that `follow` returned; None without a teacher.

    Raises:
      TeacherError: the teacher does not match the student.
      ConversionError: the teacher cannot be read.
    """
    d = config.distillation
    if not d.teacher:
        return None
    source = sources.read_source(d.teacher)
    network = source.networks["main"]
    with _named(config):
        importing.check_vocabulary(source, load_tokenizer(config.tokenizer, Path()))
    encoder = _here(network.encoder)
    head = next(part for part in places(config)["main"] if part in _HEADS)
    _check_sizes(config, network)
    if d.logits_weight and not network.has(head):
        raise _error(
            config,
            f"has no {_HEADS[head]} head, which config.recipe='{config.recipe}' needs for its "
            "logits. Set config.distillation.logits_weight=0 and another weight above 0, or use "
            "another teacher",
            field="config.distillation.logits_weight",
        )
    outputs = {head: 1} if d.logits_weight else {}
    parts = ("embeddings/", "encoder/", *(f"{name}/" for name in outputs))
    flat = stack(network.parameters, encoder)
    flat = {path: leaf for path, leaf in flat.items() if path.startswith(parts)}
    graphdef = nnx.graphdef(make_modules(network.embeddings, encoder, outputs))
    teacher = Teacher(
        network, {_ROOT: to_tree(flat)}, encoder, graphdef, _checksum(network), "".join(outputs)
    )
    _check_layers(config, encoder)
    return teacher


def bind(workdir: Workdir, config: Config, teacher: Teacher | None, *, writer: bool) -> None:
    """Stores the teacher's checksum in a new run; compares it when a run is resumed.

    Args:
      writer: whether this process writes.

    Raises:
      TeacherError: the run began with another teacher.
    """
    place = workdir.teacher
    if not workdir.is_bound():
        if writer and teacher:
            storage.write_json(place, {"checksum": teacher.checksum})
        elif writer and place.exists():  # left by a call that failed before the first step
            place.unlink()
    elif teacher:
        remedy = "restore it, or start a new run in another --workdir"
        kept = storage.read_json(place, remedy=remedy, fields={"checksum": str})["checksum"]
        if kept != teacher.checksum:
            raise TeacherError(
                f"Cannot resume: the run in --workdir={workdir} began with another teacher than "
                f"config.distillation.teacher={config.distillation.teacher}. Use the same weights, "
                "or another --workdir.",
                field="config.distillation.teacher",
                value=config.distillation.teacher,
                path=workdir.path,
            )


def start_of(config: Config, teacher: Teacher) -> sources.Source:
    """Returns initial weights of the student from the teacher (config.distillation.initialize).

    Raises:
      TeacherError: mixers, layer sizes or embedding sizes differ.
    """
    rule = config.distillation.layers
    theirs, ours = teacher.network.encoder.layers, config.encoder.layers
    of_teacher = teacher.network.parameters
    flat = {path: leaf for path, leaf in of_teacher.items() if not path.startswith("layers/")}
    for student, taken in distillation.pairs(
        "uniform" if rule == "last" else rule, len(ours), len(theirs)
    ):
        if _sizes(ours[student]) != _sizes(theirs[taken]):
            raise _error(
                config,
                f"has a layer {taken + 1} that cannot initialize layer {student + 1} of the "
                f"student: {_spell(theirs[taken])} differs from {_spell(ours[student])}. Make them "
                "equal, or set config.distillation.initialize=false",
                field="config.distillation.initialize",
            )
        prefix = f"layers/{taken}/"
        for path, leaf in of_teacher.items():
            if path.startswith(prefix):
                flat[f"layers/{student}/{path.removeprefix(prefix)}"] = leaf
    if config.embeddings.size != teacher.network.embeddings.size:
        raise _error(
            config,
            f"has embeddings of {teacher.network.embeddings.size} channels, the student "
            f"config.model.embedding_size={config.embeddings.size}. Make them equal, or set "
            "config.distillation.initialize=false",
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
        stage.map(lambda layer: dataclasses.replace(layer, dropout=0.0))
        for stage in encoder.with_mixers(**_HERE).stages
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
                f"has a {name} size of {found}, but the run began with a teacher of {kept}. Use "
                "that teacher, or another --workdir",
            )
    if table.vocab_size != config.tokenizer.vocab_size:
        raise _error(
            config,
            f"has a vocabulary of {table.vocab_size}, the student "
            f"config.tokenizer.vocab_size={config.tokenizer.vocab_size}. Leave that field out",
            field="config.tokenizer.vocab_size",
            value=config.tokenizer.vocab_size,
        )
    if table.positions < config.data.length:
        raise _error(
            config,
            f"has only {table.positions} positions, fewer than "
            f"config.data.length={config.data.length}. Use shorter rows",
            field="config.data.length",
            value=config.data.length,
        )
    if table.types == 1 and config.data.layout != "packed":
        raise _error(
            config,
            f"has one segment type, but config.data.layout='{config.data.layout}' uses two. Set "
            "config.data.layout=packed",
            field="config.data.layout",
            value=config.data.layout,
        )
    if network.encoder.reads_padding and config.data.layout == "packed":
        raise _error(
            config,
            "reads beyond the end of a document, where config.data.layout='packed' puts another "
            "document. Set config.data.layout=electra",
            field="config.data.layout",
            value=config.data.layout,
        )


def _check_layers(config: Config, encoder: EncoderConfig) -> None:
    """Checks that the compared layers exist and have comparable attention."""
    d = config.distillation
    ours, theirs = config.encoder.layers, encoder.layers
    if (d.layers != "last" or d.initialize) and len(ours) > len(theirs):
        raise _error(
            config,
            f"has {len(theirs)} layers, fewer than the {len(ours)} of the student. Set "
            "config.distillation.layers=last and initialize=false, or lower config.model.layers",
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
            "has no attention to compare: the compared layers of student and teacher have "
            f"{heads} attention heads. Set config.distillation.attention_weight=0",
            field="config.distillation.attention_weight",
        )
    differ = next((pair for pair in found if pair[0] != pair[1]), None)
    if d.attention == "scores" and differ:
        raise _error(
            config,
            f"has {differ[1]} attention heads where the student has {differ[0]}, but "
            "config.distillation.attention='scores' compares single heads. Set it to maps",
            field="config.distillation.attention",
            value=d.attention,
        )


def _count_heads(encoder: EncoderConfig, name: str) -> list[int]:
    """Returns the number of heads that each layer captures as `name`; 0 if it does not."""

    def run():
        x = jnp.zeros((1, 8, encoder.embedding_size))
        return Encoder(encoder, nnx.Rngs(0))(x, jnp.ones((1, 8), jnp.int32), capture=name)[1]

    try:
        seen = jax.eval_shape(run)
    except ValueError:  # no layer offers this capture
        return [0] * encoder.depth
    counts = []
    for stage, found in zip(encoder.stages, seen, strict=True):
        counts += [found[name].shape[2] if name in found else 0] * stage.depth
    return counts


def _sizes(layer: LayerConfig) -> tuple:
    """Returns the fields that determine the shapes and the function of a layer."""
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
    """Converts errors inside the block to TeacherError with the teacher's name."""
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
    """Returns an error about the teacher; `field` and `value` name another setting to change."""
    teacher = config.distillation.teacher
    return TeacherError(
        f"config.distillation.teacher={teacher} {what}.",
        field=field or "config.distillation.teacher",
        value=value if field else teacher,
    )
