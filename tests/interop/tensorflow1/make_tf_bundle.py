"""Writes the checkpoints of tests/interop/tensorflow1/tensorflow/ with TensorFlow; run by hand.

    python -m venv tf && tf/bin/pip install tensorflow-cpu
    tf/bin/python tests/interop/tensorflow1/make_tf_bundle.py

The checkpoints and the outputs computed by TensorFlow are committed, so no test needs TensorFlow.
The network is the formula of the official ConvBERT code (reference: papers, section "Mixed
attention") built on TensorFlow's convolutions, so every kernel has TensorFlow's orientation.
"""

import pathlib
import sys

import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import tf_values as v

FOLDER = pathlib.Path(__file__).resolve().parent / "tensorflow"


def main():
    FOLDER.mkdir(exist_ok=True)
    save("convbert/model.ckpt-1234", v.variables() | v.slots())
    save("no_adam/model.ckpt-1234", {n: s for n, s in v.variables().items() if "layer_1" not in n})
    save("v1/model.ckpt-1234", {"a/kernel": (3, 4)}, write_version=1)
    save("sharded/model.ckpt-1234", {f"part_{i}/kernel": (3, 4) for i in range(4)}, devices=2)
    save_partitioned("partitioned/model.ckpt-1234")
    for state in FOLDER.rglob("checkpoint"):  # contains this machine's path
        state.unlink()
    np.savez_compressed(FOLDER / "expected.npz", **compute())
    print(tf.__version__, sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.*")))


def save(name, shapes, *, write_version=2, devices=1):
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    with tf.Graph().as_default():
        for index, (variable, shape) in enumerate(shapes.items()):
            with tf.device(f"/cpu:{index % devices}"):
                tf.compat.v1.get_variable(
                    variable, initializer=v.value(variable, shape), use_resource=False
                )
        tf.compat.v1.get_variable(
            "global_step", initializer=np.int64(v.STEP), trainable=False, use_resource=False
        )
        saver = tf.compat.v1.train.Saver(sharded=devices > 1, write_version=write_version)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": devices})
        with tf.compat.v1.Session(config=config) as session:
            session.run(tf.compat.v1.global_variables_initializer())
            saver.save(session, str(path), write_meta_graph=False)


def save_partitioned(name):
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    with tf.Graph().as_default():
        tf.compat.v1.get_variable(
            "electra/embeddings/word_embeddings",
            shape=(6, 4),
            initializer=tf.compat.v1.ones_initializer(),
            partitioner=tf.compat.v1.fixed_size_partitioner(2),
            use_resource=False,
        )
        saver = tf.compat.v1.train.Saver()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            saver.save(session, str(path), write_meta_graph=False)


def compute() -> dict[str, np.ndarray]:
    weights = {name: tf.constant(v.value(name, shape)) for name, shape in v.variables().items()}
    tokens, mask, types = v.inputs()
    outputs = {}
    for scope in v.NETWORKS:
        hidden = encode(weights, scope, tokens, mask, types)
        outputs[f"{scope}_hidden"] = hidden.numpy()
        if scope == "generator":
            x = gelu(dense(weights, "generator_predictions/dense", hidden))
            x = norm(weights, "generator_predictions/LayerNorm", x)
            table = weights["electra/embeddings/word_embeddings"]
            logits = tf.einsum("ble,ve->blv", x, table)
            outputs["mlm_head"] = (logits + weights["generator_predictions/output_bias"]).numpy()
        else:
            x = gelu(dense(weights, "discriminator_predictions/dense", hidden))
            outputs["rtd_head"] = dense(weights, "discriminator_predictions/dense_1", x)[..., 0]
    return {name: np.asarray(value) for name, value in outputs.items()}


def encode(weights, scope, tokens, mask, types):
    """Apply embeddings, norm, projection and layers; the convolution reads padding."""
    tables = "electra/embeddings/"
    x = tf.gather(weights[tables + "word_embeddings"], tokens)
    x += weights[tables + "position_embeddings"][: tokens.shape[1]]
    x += tf.gather(weights[tables + "token_type_embeddings"], types)
    x = norm(weights, tables + "LayerNorm", x)
    if f"{scope}/embeddings_project/kernel" in weights:
        x = dense(weights, f"{scope}/embeddings_project", x)
    for i in range(v.LAYERS):
        layer = f"{scope}/encoder/layer_{i}"
        mixed = dense(
            weights, f"{layer}/attention/output/dense", mix(weights, scope, layer, x, mask)
        )
        x = norm(weights, f"{layer}/attention/output/LayerNorm", x + mixed)
        inner = gelu(grouped(weights, f"{layer}/intermediate/g_dense", x))
        x = norm(
            weights,
            f"{layer}/output/LayerNorm",
            x + grouped(weights, f"{layer}/output/g_dense", inner),
        )
    return x


def mix(weights, scope, layer, x, mask):
    _, heads, size, _ = v.NETWORKS[scope]
    own = f"{layer}/attention/self"
    batch, length = mask.shape

    def split(t):
        return tf.reshape(t, (batch, length, heads, size))

    query, key, value, point = (
        dense(weights, f"{own}/{name}", x) for name in ("query", "key", "value", "conv_attn_point")
    )
    # separable_conv1d's kernels [K, C, 1] and [1, C, O] with a height of 1.
    span = tf.nn.separable_conv2d(
        x[:, None],
        weights[f"{own}/conv_attn_key/depthwise_kernel"][None],
        weights[f"{own}/conv_attn_key/pointwise_kernel"][None],
        strides=[1, 1, 1, 1],
        padding="SAME",
    )[:, 0]
    span += weights[f"{own}/conv_attn_key/bias"]
    logits = dense(weights, f"{own}/conv_attn_kernel", span * query)
    taps = tf.nn.softmax(tf.reshape(logits, (batch, length, heads, v.TAPS)), axis=-1)
    half = (v.TAPS - 1) // 2
    padded = tf.pad(point, [[0, 0], [half, half], [0, 0]])
    shifted = tf.stack([split(padded[:, i : i + length]) for i in range(v.TAPS)], axis=-1)
    convolved = tf.einsum("blhdk,blhk->blhd", shifted, taps)
    scores = tf.einsum("bqhd,bkhd->bhqk", split(query), split(key)) / size**0.5
    scores += (1.0 - tf.cast(mask[:, None, None, :], tf.float32)) * -10000.0
    attended = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), split(value))
    joined = tf.concat([attended, convolved], axis=2)
    return tf.reshape(joined, (batch, length, 2 * heads * size))


def dense(weights, name, x):
    return tf.einsum("...i,io->...o", x, weights[f"{name}/kernel"]) + weights[f"{name}/bias"]


def grouped(weights, name, x):
    kernel = weights[f"{name}/kernel"]
    parts = tf.split(x, v.GROUPS, axis=-1)
    out = tf.concat([tf.matmul(part, kernel[i]) for i, part in enumerate(parts)], axis=-1)
    return out + weights[f"{name}/bias"]


def norm(weights, name, x):
    mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
    scaled = (x - mean) * tf.math.rsqrt(variance + 1e-12)
    return scaled * weights[f"{name}/gamma"] + weights[f"{name}/beta"]


def gelu(x):
    return x * 0.5 * (1.0 + tf.math.erf(x / 2.0**0.5))


if __name__ == "__main__":
    main()
