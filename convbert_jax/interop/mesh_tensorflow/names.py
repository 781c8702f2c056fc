"""How one parameter is called, which way round it lies and by what it is multiplied, in Mesh
TensorFlow and here.

Ours is a path in `models/sequences/networks.py`, theirs a variable or, of filters, one for each
tap. Three factors make two ways to say the same network one: our attention divides scores by
sqrt(D), which theirs leaves to its weights; ours reads words times sqrt(C), which makes of their
table one by sqrt(C), and theirs divides hidden states by sqrt(C) before the same table gives
logits, which then needs nothing more.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from flax import nnx

from convbert_jax.config.sequences import EncoderDecoderConfig
from convbert_jax.interop.claims import shown
from convbert_jax.interop.mesh_tensorflow.outline import (
    CONV,
    FEED,
    LAYERS,
    LOGITS,
    PLACES,
    READ,
    TABLE,
    TAPS,
    Outline,
)
from convbert_jax.interop.networks import ConversionError, to_tree
from convbert_jax.models.sequences.networks import EncoderDecoder
from convbert_jax.training.state import flatten


@dataclasses.dataclass(frozen=True)
class Place:
    """Variables of one parameter of one layer.

    Attributes:
      names: one, or one for each tap.
      make: their arrays -> ours.
      shape: of each of them.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[..., np.ndarray]


def places_of(outline: Outline) -> dict[str, list[Place]]:
    """Our path -> its places: one, or one for each layer of the stage."""
    hidden, root = outline.model.hidden_size, outline.model.hidden_size**0.5
    _, last = outline.norms
    found = {
        "target/word/embedding": [_one(TABLE, (outline.words, hidden), factor=1 / root)],
        "encoder/norm/scale": [_one(f"encoder/{last}/scale", (hidden,))],
        "decoder/norm/scale": [_one(f"decoder/{last}/scale", (hidden,))],
    }
    if outline.positions:
        shape = (outline.model.positions, hidden)
        found["target/position/embedding"] = [_one(PLACES, shape)]
    if not outline.tied:
        found["output/embedding"] = [_one(LOGITS, (hidden, outline.words), turned=True)]
    for side in LAYERS:
        layers = [_layer(outline, side, number) for number in range(outline.depth(side))]
        for path in layers[0]:
            found[f"{side}/stages/0/{path}"] = [layer[path] for layer in layers]
    return found


def to_parameters(
    read: Callable[[str, tuple[int, ...]], np.ndarray],
    outline: Outline,
    config: EncoderDecoderConfig,
) -> dict:
    """Parameters of a model of `config`, a nested dict of float32 arrays.

    Args:
      read: (name, shape) -> a variable, float32.
    """
    flat, wanted = {}, _shapes(config)
    for path, places in places_of(outline).items():
        arrays = [
            place.make(*(read(name, place.shape) for name in place.names)) for place in places
        ]
        flat[path] = np.stack(arrays) if "/stages/" in path else arrays[0]
    there = {path: array.shape for path, array in flat.items()}
    assert there == wanted, there.items() ^ wanted.items()
    return to_tree(flat)


def check_all(names: set[str], outline: Outline) -> None:
    """Refuses variables without a place, and places without a variable.

    Raises:
      ConversionError: it names some.
    """
    wanted = {
        name for places in places_of(outline).values() for place in places for name in place.names
    }
    for faults, what in ((wanted - names, "lacks"), (names - wanted, "has no place here for")):
        if faults:
            some = ", ".join(map(shown, sorted(faults)[:3]))
            more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise ConversionError(
                f"it {what} {some}{more}; it is not complete, or of another model."
            )


def _layer(outline: Outline, side: str, number: int) -> dict[str, Place]:
    """Path inside of a layer -> its place."""
    c, inner, taps = outline.model.hidden_size, outline.model.ffn_size, outline.taps[side]
    norm, _ = outline.norms
    block = f"{side}/block_{number:03d}"
    at = {kind: f"{block}/layer_{i:03d}" for i, kind in enumerate(LAYERS[side])}

    def dense(path: str, name: str, bias: bool = True, shape=(c, c)) -> dict[str, Place]:
        made = {f"{path}/kernel": _one(f"{name}/kernel", shape)}
        return made | ({f"{path}/bias": _one(f"{name}/bias", shape[1:])} if bias else {})

    conv, feed = f"{at[CONV]}/{CONV}", f"{at[FEED]}/{FEED}"
    separable = f"{conv}/separable_conv1d"
    tap = [f"{conv}/{TAPS[outline.filters].format(i)}" for i in range(taps)]
    kernels, biases = (tuple(f"{name}/{leaf}" for name in tap) for leaf in ("kernel", "bias"))
    found = {
        **dense("mixer/value", f"{conv}/local_conv_inp_0"),
        **dense("mixer/gate", f"{conv}/local_conv_inp_1"),
        "mixer/depthwise_bias": _one(
            f"{separable}/depthwise_conv_hack/depthwise_dense_0/bias", (c,)
        ),
        **dense("mixer/pointwise", f"{separable}/pointwise_dense"),
        **dense("mixer/output", f"{conv}/local_conv_attn_op_projection"),
        "mixer_norm/scale": _one(f"{at[CONV]}/{norm}/scale", (c,)),
        "feed_forward_norm/scale": _one(f"{at[FEED]}/{norm}/scale", (c,)),
        **dense("feed_forward/output", f"{feed}/wo", False, (inner, c)),
    }
    if outline.filters == "light":
        found["mixer/filters"] = Place(kernels, (c,), _by_tap)
    else:
        found["mixer/conv_kernel/kernel"] = Place(
            kernels, (c, c), lambda *taps: _by_tap(*taps).reshape(c, -1)
        )
        found["mixer/conv_kernel/bias"] = Place(biases, (c,), lambda *taps: _by_tap(*taps).ravel())
    first = "wi_0" if outline.gated else "wi"
    found |= dense("feed_forward/intermediate", f"{feed}/{first}", False, (c, inner))
    if outline.gated:
        found |= dense("feed_forward/gate", f"{feed}/wi_1", False, (c, inner))
    if side == "decoder":
        read = f"{at[READ]}/{READ}"
        found["source/query/kernel"] = _one(f"{read}/q", (c, c), factor=outline.key_size**0.5)
        for ours, theirs in (("key", "k"), ("value", "v"), ("output", "o")):
            found[f"source/{ours}/kernel"] = _one(f"{read}/{theirs}", (c, c))
        found["source_norm/scale"] = _one(f"{at[READ]}/{norm}/scale", (c,))
    return found


def _one(name: str, shape: tuple[int, ...], factor: float = 1.0, turned: bool = False) -> Place:
    def make(array):
        array = np.ascontiguousarray(array.T) if turned else array
        return array if factor == 1.0 else array * np.float32(factor)

    return Place((name,), shape, make)


def _by_tap(*arrays: np.ndarray) -> np.ndarray:
    """Taps last."""
    return np.stack(arrays, axis=-1)


def _shapes(config: EncoderDecoderConfig) -> dict[str, tuple[int, ...]]:
    """Path -> shape of each parameter."""
    model = nnx.eval_shape(lambda: EncoderDecoder(config, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {path: leaf.shape for path, leaf in flatten(params).items()}
