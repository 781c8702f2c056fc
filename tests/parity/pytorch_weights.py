"""Parameters (or gradients) of Hugging Face's PyTorch encoders as our nested dict."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

# Ours -> theirs. Kernels are transposed, but grouped ones are not; layers are a list there.
OUTSIDE = {
    "embeddings/word/embedding": "embeddings.word_embeddings.weight",
    "embeddings/position/embedding": "embeddings.position_embeddings.weight",
    "embeddings/type/embedding": "embeddings.token_type_embeddings.weight",
    "embeddings/norm/scale": "embeddings.LayerNorm.weight",
    "embeddings/norm/bias": "embeddings.LayerNorm.bias",
    "encoder/embeddings_project/kernel": "embeddings_project.weight",
    "encoder/embeddings_project/bias": "embeddings_project.bias",
}
LAYER = {
    "mixer/query": "attention.self.query",
    "mixer/key": "attention.self.key",
    "mixer/value": "attention.self.value",
    "mixer/key_conv/depthwise": "attention.self.key_conv_attn_layer.depthwise.weight",
    "mixer/key_conv/pointwise": "attention.self.key_conv_attn_layer.pointwise.weight",
    "mixer/key_conv/bias": "attention.self.key_conv_attn_layer.bias",
    "mixer/conv_kernel": "attention.self.conv_kernel_layer",
    "mixer/conv_value": "attention.self.conv_out_layer",
    "mixer/output": "attention.output.dense",
    "mixer_norm": "attention.output.LayerNorm",
    "feed_forward/intermediate": "intermediate.dense",
    "feed_forward/output": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}


def convert(name, array):
    """One of their parameters (or its gradient) in our layout."""
    if "depthwise" in name:
        return array.transpose(2, 1, 0)[:, 0]
    if "pointwise" in name:
        return array[..., 0].T
    if name.endswith("key_conv_attn_layer.bias"):
        return array[:, 0]
    table = "_embeddings." in name
    return array.T if array.ndim == 2 and not table else array


def read(depth, theirs):
    """{"embeddings": ..., "encoder": ...} from arrays by their name, each of which must be used."""
    left = dict(theirs)

    def take(name):
        return convert(name, left.pop(name))

    flat = {ours: take(name) for ours, name in OUTSIDE.items() if name in left}
    for ours, name in LAYER.items():
        for leaf, suffix in (("", ""), ("/kernel", ".weight"), ("/bias", ".bias")):
            if f"encoder.layer.0.{name}{suffix}" not in left:
                continue
            if ours.endswith("_norm"):
                leaf = leaf.replace("kernel", "scale")
            layers = [take(f"encoder.layer.{i}.{name}{suffix}") for i in range(depth)]
            flat[f"encoder/stages/0/{ours}{leaf}"] = np.stack(layers)
    assert not left, f"left over: {sorted(left)}"
    nested = {}
    for path, array in flat.items():
        *folders, leaf = path.split("/")
        functools.reduce(lambda tree, key: tree.setdefault(key, {}), folders, nested)[leaf] = array
    return jax.tree.map(jnp.asarray, nested)
