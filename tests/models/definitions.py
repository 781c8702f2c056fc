"""Every mixer of the package once more, as its formula says it, in numpy.

A mixer in `MIXERS` needs a row in DEFINITIONS and in COUNTS; KINDS are what the tests over all
mixers run over.
"""

import numpy as np

from convbert_jax.config.mixers import MIXERS

# Fields of config.model by name: each mixer, and those forms of one that have other parameters.
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


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def dense(x, layer):
    return x @ layer["kernel"] + layer["bias"]


def by_head(x, heads):
    return x.reshape(*x.shape[:2], heads, -1)


def convolve(values, filters, ids, dilation=1):
    """LConv: values [B, L, H, D], filters [..., H, K] of each position; [B, L, H D]."""
    out, taps = np.zeros_like(values), filters.shape[-1]
    filters = np.broadcast_to(filters, (*values.shape[:3], taps))
    batch, length = ids.shape
    for b in range(batch):
        for t in range(length):
            for i in range(taps):
                s = t + (i - taps // 2) * dilation
                if 0 <= s < length and ids[b, s] == ids[b, t] != 0:
                    out[b, t] += filters[b, t, :, i, None] * values[b, s]
    return out.reshape(*ids.shape, -1)


def depthwise(x, filters, ids, dilation=1):
    """filters [K, C]: each channel is a head of one."""
    return convolve(x[..., None], filters.T, ids, dilation)


def separable_conv(x, layer, ids):
    return depthwise(x, layer["depthwise"], ids) @ layer["pointwise"] + layer["bias"]


def attend(query, key, value, ids):
    scores = np.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    visible = (ids[:, :, None] == ids[:, None, :]) & (ids != 0)[:, None, :]
    visible |= (ids == 0)[:, :, None]  # what padding gets does not matter
    maps = softmax(np.where(visible[:, None], scores, -np.inf))
    return np.einsum("bhqk,bkhd->bqhd", maps, value).reshape(*ids.shape, -1)


def gated(x, p):
    values = dense(x, p["value"])
    return values / (1 + np.exp(-dense(x, p["gate"]))) if "gate" in p else values


def attention(p, x, ids, mixer):
    query, key, value = (
        by_head(dense(x, p[name]), mixer.attention_heads) for name in ("query", "key", "value")
    )
    return dense(attend(query, key, value, ids), p["output"])


def mixed(p, x, ids, mixer):
    """ConvBERT eq. 2 - 5."""
    attended, convolved = mixer.attention_heads, mixer.convolution_heads
    size = mixer.head_size
    query, value = dense(x, p["query"]), dense(x, p["value"])
    a = attend(
        by_head(query[..., : attended * size], attended),
        by_head(dense(x, p["key"]), attended),
        by_head(value[..., : attended * size], attended),
        ids,
    )
    own = query[..., : convolved * size]
    if mixer.filters == "light":
        filters = softmax(p["conv_filters"])
    else:
        if mixer.filters == "span_dynamic":
            own = own * separable_conv(x, p["key_conv"], ids)
        filters = softmax(by_head(dense(own, p["conv_kernel"]), convolved))
    values = dense(x, p["conv_value"]) if mixer.own_value else value[..., : convolved * size]
    c = convolve(by_head(values, convolved), filters, ids)
    return dense(np.concatenate([a, c], axis=-1), p["output"])


def span_dynamic(p, x, ids, mixer):
    products = dense(x, p["query"]) * separable_conv(x, p["key_conv"], ids)
    filters = softmax(by_head(dense(products, p["conv_kernel"]), mixer.heads))
    values = by_head(dense(x, p["conv_value"]), mixer.heads)
    return dense(convolve(values, filters, ids), p["output"])


def dynamic(p, x, ids, mixer):
    """Wu et al. 2019, §3.2 and §4."""
    values = gated(x, p)
    filters = softmax(by_head(values @ p["conv_kernel"], mixer.heads))
    return dense(convolve(by_head(values, mixer.heads), filters, ids), p["output"])


def light(p, x, ids, mixer):
    """Wu et al. 2019, §3.1 and §4."""
    values = by_head(gated(x, p), mixer.heads)
    return dense(convolve(values, softmax(p["filters"]), ids), p["output"])


def dilated(p, x, ids, mixer):
    return dense(depthwise(gated(x, p), p["depthwise"], ids, mixer.dilation), p["output"])


def separable(p, x, ids, mixer):
    return separable_conv(x, p["conv"], ids)


DEFINITIONS = {
    "mixed": mixed,
    "attention": attention,
    "bottleneck": attention,
    "span_dynamic": span_dynamic,
    "dynamic": dynamic,
    "light": light,
    "dilated": dilated,
    "separable": separable,
}


# Parameters by hand, of C channels, H heads, K taps and head ratio 2: with biases, a dense layer of
# C to W channels has C W + W.
COUNTS = {
    # 3 of attention, key's pointwise and value of the convolution into C / 2; W_f; out of C
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
    # W_f of the query; no pointwise key and no depthwise
    "mixed, dynamic": lambda c, h, k: (
        4 * c * c // 2 + 4 * c // 2 + (c // 2 + 1) * h // 2 * k + c * c + c
    ),
    "mixed, light, one value": lambda c, h, k: 3 * (c * c + c) // 2 + h // 2 * k + c * c + c,
    # 3 of 4 heads attend: q, k, v into 3 C / 4, key and value of the convolution into C / 4
    "mixed, a quarter convolves": lambda c, h, k: (
        (9 + 2) * (c * c + c) // 4 + k * c + (c // 4 + 1) * h // 4 * k + c * c + c
    ),
    # k into C / 4, q and v, which both parts share, and the key of the convolution into 3 C / 4
    "mixed, most convolves, one value": lambda c, h, k: (
        (1 + 9) * (c * c + c) // 4 + k * c + (3 * c // 4 + 1) * 3 * h // 4 * k + c * c + c
    ),
    "dynamic without a gate": lambda c, h, k: 2 * (c * c + c) + c * h * k,
    "light without a gate": lambda c, h, k: 2 * (c * c + c) + h * k,
    "dilated by 3": lambda c, h, k: 3 * (c * c + c) + k * c,
    "dilated without a gate": lambda c, h, k: 2 * (c * c + c) + k * c,
}
