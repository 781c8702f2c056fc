"""Reference implementations of all mixers in numpy.

Each mixer in `MIXERS` needs an entry in DEFINITIONS and in COUNTS. Tests over all mixers
iterate over KINDS.
"""

import jax
import numpy as np
from scipy.special import erf

from convbert_jax.config.mixers import MIXERS

# Name -> fields of config.model: each mixer, and its variants with different parameters.
FORMS = {
    "mixed, dynamic": {"mixer": "mixed", "mixer_fields": ("filters=dynamic",)},
    "mixed, light, one value": {
        "mixer": "mixed",
        "mixer_fields": ("filters=light", "own_value=false"),
    },
    "mixed, a quarter convolves": {"mixer": "mixed", "mixer_fields": ("convolution_share=0.25",)},
    "mixed, most convolves, one value": {
        "mixer": "mixed",
        "mixer_fields": ("own_value=false", "convolution_share=0.75"),
    },
    "dynamic without a gate": {"mixer": "dynamic", "mixer_fields": ("glu=false",)},
    "light without a gate": {"mixer": "light", "mixer_fields": ("glu=false",), "kernel_size": 4},
    "dilated by 3": {"mixer": "dilated", "dilation": 3, "kernel_size": 5},
    "dilated without a gate": {"mixer": "dilated", "mixer_fields": ("glu=false",)},
}
KINDS = {name: {"mixer": name} for name in MIXERS} | FORMS


def check_gradients(gradients, function, arguments, step=1e-6):
    """Check float32 gradients against float64 finite differences of `function`.

    Uses one random direction per leaf of `arguments`.
    """
    rng = np.random.default_rng(1)
    leaves, tree = jax.tree_util.tree_flatten_with_path(arguments)
    values = [np.asarray(leaf, np.float64) for _, leaf in leaves]
    for i, ((path, _), gradient) in enumerate(zip(leaves, jax.tree.leaves(gradients), strict=True)):
        direction = rng.standard_normal(values[i].shape)
        ends = [
            function(*tree.unflatten([*values[:i], values[i] + by * direction, *values[i + 1 :]]))
            for by in (step, -step)
        ]
        slope = (np.asarray(gradient, np.float64) * direction).sum()
        size = np.linalg.norm(gradient) * np.linalg.norm(direction)
        message = jax.tree_util.keystr(path)
        assert gradient.dtype == np.float32, message
        wanted = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(slope, wanted, rtol=0, atol=1e-5 * (1 + size), err_msg=message)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gelu(x):
    return x * (1 + erf(x / 2**0.5)) / 2


def layer_norm(x, p, epsilon=1e-12):
    deviation = np.sqrt(x.var(-1, keepdims=True) + epsilon)
    return (x - x.mean(-1, keepdims=True)) / deviation * p["scale"] + p["bias"]


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def by_head(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)


class Context:
    """Inputs of a definition other than parameters and states.

    Attributes:
      mixer: the specification.
      ids: segment ids [B, L], 0 is padding.
      causal: whether a position reads only itself and earlier positions.
      seen: expected capture of the layer: "attention", "scores", "filters".
    """

    def __init__(self, mixer, ids, causal=False):
        self.mixer, self.ids, self.causal = mixer, np.asarray(ids), causal
        masked = getattr(mixer, "mask_convolution", True)
        self.conv_ids = self.ids if masked else np.ones_like(self.ids)
        self.seen = {}

    def convolve(self, values, filters, dilation=1):
        """LConv: values [B, L, H, D], filters [..., H, K] per position; returns [B, L, H D]."""
        out, taps, ids = np.zeros_like(values), filters.shape[-1], self.conv_ids
        filters = np.broadcast_to(filters, (*values.shape[:3], taps))
        here = np.arange(ids.shape[1])
        for i in range(taps):
            there = here + (i - (taps - 1 if self.causal else taps // 2)) * dilation
            inside = (there >= 0) & (there < len(here))
            there = np.where(inside, there, 0)
            read = inside & (ids[:, there] == ids) & (ids != 0)
            out += read[..., None, None] * filters[..., i, None] * values[:, there]
        return out.reshape(*ids.shape, -1)

    def normalize(self, logits):
        """Normalize logits to filters [..., H, K], and record them for all positions."""
        filters = softmax(logits)
        self.seen["filters"] = np.broadcast_to(filters, (*self.ids.shape, *filters.shape[-2:]))
        return filters

    def depthwise(self, x, filters, dilation=1):
        """Depthwise convolution with filters [K, C]; each channel is a head of width 1."""
        return self.convolve(x[..., None], filters.T, dilation)

    def separable(self, x, layer):
        return self.depthwise(x, layer["depthwise"]) @ layer["pointwise"] + layer["bias"]

    def attend(self, query, key, value):
        ids, length = self.ids, self.ids.shape[1]
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
        own = np.where(ids == 0, ids.max(axis=1, keepdims=True), ids)  # padding sees the last
        visible = (own[:, :, None] == ids[:, None, :]) & (ids != 0)[:, None, :]
        if self.causal:
            visible &= np.tri(length, dtype=bool)
        self.seen["scores"] = np.where(visible[:, None], scores, 0)
        maps = softmax(np.where(visible[:, None], scores, -np.inf))
        self.seen["attention"] = maps
        return np.einsum("bhqk,bkhd->bqhd", maps, value).reshape(*ids.shape, -1)


def gated(x, p):
    values = dense(x, p["value"])
    return values / (1 + np.exp(-dense(x, p["gate"]))) if "gate" in p else values


def attention(p, x, c):
    query, key, value = (
        by_head(dense(x, p[name]), c.mixer.attention_heads) for name in ("query", "key", "value")
    )
    return dense(c.attend(query, key, value), p["output"])


def mixed(p, x, c):
    """ConvBERT eq. 2 - 5."""
    attended, convolved = c.mixer.attention_heads, c.mixer.convolution_heads
    size = c.mixer.head_size
    query, value = dense(x, p["query"]), dense(x, p["value"])
    a = c.attend(
        by_head(query[..., : attended * size], attended),
        by_head(dense(x, p["key"]), attended),
        by_head(value[..., : attended * size], attended),
    )
    own = query[..., : convolved * size]
    if c.mixer.filters == "light":
        filters = c.normalize(p["conv_filters"])
    else:
        if c.mixer.filters == "span_dynamic":
            own = own * c.separable(x, p["key_conv"])
        filters = c.normalize(by_head(dense(own, p["conv_kernel"]), convolved))
    values = dense(x, p["conv_value"]) if c.mixer.own_value else value[..., : convolved * size]
    b = c.convolve(by_head(values, convolved), filters)
    return dense(np.concatenate([a, b], axis=-1), p["output"])


def span_dynamic(p, x, c):
    products = dense(x, p["query"]) * c.separable(x, p["key_conv"])
    filters = c.normalize(by_head(dense(products, p["conv_kernel"]), c.mixer.heads))
    values = by_head(dense(x, p["conv_value"]), c.mixer.heads)
    return dense(c.convolve(values, filters), p["output"])


def dynamic(p, x, c):
    """Wu et al. 2019, §3.2 and §4."""
    values = gated(x, p)
    filters = c.normalize(by_head(values @ p["conv_kernel"], c.mixer.heads))
    return dense(c.convolve(by_head(values, c.mixer.heads), filters), p["output"])


def light(p, x, c):
    """Wu et al. 2019, §3.1 and §4."""
    values = by_head(gated(x, p), c.mixer.heads)
    return dense(c.convolve(values, c.normalize(p["filters"])), p["output"])


def dilated(p, x, c):
    return dense(c.depthwise(gated(x, p), p["depthwise"], c.mixer.dilation), p["output"])


def short(p, x, c):
    """Lfm2ShortConv of transformers."""
    before, after, values = np.split(x @ p["input"]["kernel"], 3, axis=-1)
    return (after * c.depthwise(before * values, p["depthwise"])) @ p["output"]["kernel"]


def separable(p, x, c):
    return c.separable(x, p["conv"])


def layer(p, x, mixer, c):
    """BERT layer around a mixer of DEFINITIONS."""
    x = layer_norm(x + DEFINITIONS[mixer](p["mixer"], x, c), p["mixer_norm"])
    inner = gelu(dense(x, p["feed_forward"]["intermediate"]))
    return layer_norm(x + dense(inner, p["feed_forward"]["output"]), p["feed_forward_norm"])


DEFINITIONS = {
    "mixed": mixed,
    "attention": attention,
    "bottleneck": attention,
    "span_dynamic": span_dynamic,
    "dynamic": dynamic,
    "light": light,
    "dilated": dilated,
    "separable": separable,
    "short": short,
}


# Parameter counts by hand for C channels, H heads, K taps and head ratio 2. A dense layer with
# bias from C to W channels has C W + W.
COUNTS = {
    # 3 of attention, the pointwise key and the value of the convolution into C / 2; W_f; output C
    "mixed": lambda c, h, k: (
        5 * c * c // 2 + 5 * c // 2 + k * c + (c // 2 + 1) * h // 2 * k + c * c + c
    ),
    "attention": lambda c, h, k: 4 * (c * c + c),
    "bottleneck": lambda c, h, k: 4 * c * c // 2 + 3 * c // 2 + c,
    "span_dynamic": lambda c, h, k: 4 * (c * c + c) + k * c + (c + 1) * h * k,
    "dynamic": lambda c, h, k: 3 * (c * c + c) + c * h * k,
    "light": lambda c, h, k: 3 * (c * c + c) + h * k,
    "dilated": lambda c, h, k: 3 * (c * c + c) + k * c,
    "separable": lambda c, h, k: c * c + c + k * c,
    "short": lambda c, h, k: 4 * c * c + k * c,
    # W_f reads the query; no pointwise key, no depthwise convolution
    "mixed, dynamic": lambda c, h, k: (
        4 * c * c // 2 + 4 * c // 2 + (c // 2 + 1) * h // 2 * k + c * c + c
    ),
    "mixed, light, one value": lambda c, h, k: 3 * (c * c + c) // 2 + h // 2 * k + c * c + c,
    # 3 of 4 heads attend: q, k, v into 3 C / 4, key and value of the convolution into C / 4
    "mixed, a quarter convolves": lambda c, h, k: (
        (9 + 2) * (c * c + c) // 4 + k * c + (c // 4 + 1) * h // 4 * k + c * c + c
    ),
    # k into C / 4; the shared q and v, and the key of the convolution, into 3 C / 4
    "mixed, most convolves, one value": lambda c, h, k: (
        (1 + 9) * (c * c + c) // 4 + k * c + (3 * c // 4 + 1) * 3 * h // 4 * k + c * c + c
    ),
    "dynamic without a gate": lambda c, h, k: 2 * (c * c + c) + c * h * k,
    "light without a gate": lambda c, h, k: 2 * (c * c + c) + h * k,
    "dilated by 3": lambda c, h, k: 3 * (c * c + c) + k * c,
    "dilated without a gate": lambda c, h, k: 2 * (c * c + c) + k * c,
}
