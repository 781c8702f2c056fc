"""Variables of a tiny official ConvBERT checkpoint: names, shapes and values.

make_tf_bundle.py writes these values with TensorFlow, and the tests read them without it.
"""

import zlib

import numpy as np

STEP = 1234
VOCAB, EMBEDDING, POSITIONS, TYPES, TAPS, GROUPS, LAYERS = 40, 8, 24, 2, 5, 2, 2
# hidden size, heads per kind, head size, feed-forward size
NETWORKS = {"electra": (16, 2, 4, 32), "generator": (8, 1, 4, 32)}


def variables() -> dict[str, tuple[int, ...]]:
    """Return name -> shape, as in the official code."""
    shapes = {
        "electra/embeddings/word_embeddings": (VOCAB, EMBEDDING),
        "electra/embeddings/position_embeddings": (POSITIONS, EMBEDDING),
        "electra/embeddings/token_type_embeddings": (TYPES, EMBEDDING),
        **_norm("electra/embeddings/LayerNorm", EMBEDDING),
    }
    for scope, (hidden, heads, size, inner) in NETWORKS.items():
        width = heads * size
        if hidden != EMBEDDING:
            shapes |= _dense(f"{scope}/embeddings_project", EMBEDDING, hidden)
        for i in range(LAYERS):
            layer = f"{scope}/encoder/layer_{i}"
            own = f"{layer}/attention/self"
            for name in ("query", "key", "value", "conv_attn_point"):
                shapes |= _dense(f"{own}/{name}", hidden, width)
            shapes |= {
                f"{own}/conv_attn_key/depthwise_kernel": (TAPS, hidden, 1),
                f"{own}/conv_attn_key/pointwise_kernel": (1, hidden, width),
                f"{own}/conv_attn_key/bias": (width,),
            }
            shapes |= _dense(f"{own}/conv_attn_kernel", width, heads * TAPS)
            shapes |= _dense(f"{layer}/attention/output/dense", 2 * width, hidden)
            shapes |= _norm(f"{layer}/attention/output/LayerNorm", hidden)
            shapes |= _grouped(f"{layer}/intermediate/g_dense", hidden, inner)
            shapes |= _grouped(f"{layer}/output/g_dense", inner, hidden)
            shapes |= _norm(f"{layer}/output/LayerNorm", hidden)
    generator = NETWORKS["generator"][0]
    shapes |= _dense("generator_predictions/dense", generator, EMBEDDING)
    shapes |= _norm("generator_predictions/LayerNorm", EMBEDDING)
    shapes["generator_predictions/output_bias"] = (VOCAB,)
    discriminator = NETWORKS["electra"][0]
    shapes |= _dense("discriminator_predictions/dense", discriminator, discriminator)
    shapes |= _dense("discriminator_predictions/dense_1", discriminator, 1)
    return shapes


def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a normal draw seeded by the name: around 1 for scales, positive for adam_v."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    draw = 0.3 * rng.standard_normal(shape)
    if name.endswith("/adam_v"):
        draw = np.abs(draw)
    return (draw + name.endswith("/gamma")).astype(np.float32)


def slots() -> dict[str, tuple[int, ...]]:
    """Return Adam's moments by name."""
    return {
        f"{name}{slot}": shape
        for name, shape in variables().items()
        for slot in ("/adam_m", "/adam_v")
    }


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (tokens, mask, types), each [3, 20]; the last two rows are padded."""
    rng = np.random.default_rng(0)
    tokens, types = rng.integers(0, VOCAB, (3, 20)), rng.integers(0, TYPES, (3, 20))
    mask = np.arange(20) < np.array([20, 13, 4])[:, None]
    return tokens, mask.astype(np.int64), types


def _dense(name, inputs, outputs):
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def _grouped(name, inputs, outputs):
    kernel = (GROUPS, inputs // GROUPS, outputs // GROUPS)
    return {f"{name}/kernel": kernel, f"{name}/bias": (outputs,)}


def _norm(name, size):
    return {f"{name}/gamma": (size,), f"{name}/beta": (size,)}
