"""The pre-trained convolutions of Tay et al. 2021 computed once more in PyTorch, with the
names of Mesh TensorFlow, for rows [B, T] of one text each.

`Published.variables` are what a checkpoint holds; `write` makes one.
"""

import math
from pathlib import Path

import numpy as np
import torch

from convbert_jax.interop.tensorflow1.tensor_bundle import write_bundle

PAD, END = 0, 1
STEP = 524_288


# What T5 writes beside a checkpoint, in part.
GIN = """
import mesh_tensorflow.transformer.transformer_layers

# Macros:
# ==============================================================================
d_kv = {d_kv}
dropout_rate = 0.0

# Parameters for decoder/EncDecAttention:
# ==============================================================================
decoder/EncDecAttention.key_value_size = %d_kv
decoder/EncDecAttention.shared_kv = False
decoder/LayerStack.sublayers_final = \\
    [@transformer.sublayer_rms_norm, @transformer.sublayer_dropout]
encoder/LocalConvAttnBlock.max_relative_pos = {after}
encoder/LocalConvAttnBlock.min_relative_pos = -{after}
encoder/LocalConvAttnBlock.num_unique_depth_filters = 2
decoder/LocalConvAttnBlock.max_relative_pos = 0
decoder/LocalConvAttnBlock.min_relative_pos = -{before}
sublayer_rms_norm.epsilon = 1e-06
unit_scaling_convention.value = False
"""


class Published:
    """Sizes as those of bi_bert_base.gin are called there.

    Attributes:
      variables: name -> array, random, of a size at which no mistake is too small to see.
    """

    def __init__(
        self, kind="light", *, words=128, d_model=32, d_ff=48, d_kv=8, layers=(2, 2), taps=(9, 9),
        places=0, gated=False, tied=True, norms=("layer_norm", "final_layer_norm"), seed=0,
    ):  # fmt: skip
        self.kind, self.d_model, self.d_kv = kind, d_model, d_kv
        self.taps = dict(zip(("encoder", "decoder"), taps, strict=True))
        self.d_ff, self.layers, self.gated, self.norms = d_ff, layers, gated, norms
        rng = np.random.default_rng(seed)

        def normal(*shape, spread=1.0, mean=0.0):
            return (mean + spread * rng.normal(size=shape)).astype(np.float32)

        v = {"shared/embedding": normal(words, d_model)}
        if places:
            v["shared/positional_embedding"] = normal(places, d_model)
        if not tied:
            v["decoder/logits/kernel"] = normal(d_model, words, spread=d_model**-0.5)
        for side, depth in zip(("encoder", "decoder"), layers, strict=True):
            v[f"{side}/{norms[1]}/scale"] = normal(d_model, spread=0.2, mean=1.0)
            for block in range(depth):
                for number, (layer, make) in enumerate(self._layers(side)):
                    at = f"{side}/block_{block:03d}/layer_{number:03d}"
                    v[f"{at}/{norms[0]}/scale"] = normal(d_model, spread=0.2, mean=1.0)
                    for name, shape in make().items():
                        spread = 0.2 if name.endswith("bias") else shape[0] ** -0.5
                        spread = 1.0 if name.startswith("lightwt") else spread
                        v[f"{at}/{layer}/{name}"] = normal(*shape, spread=spread)
        self.variables = v

    def _layers(self, side):
        conv = ("LocalConvAttnBlock", lambda: self._conv(self.taps[side]))
        read, feed = ("EncDecAttention", self._read), ("DenseReluDense", self._feed)
        return (conv, feed) if side == "encoder" else (conv, read, feed)

    def _conv(self, taps):
        d = self.d_model
        dense = ["local_conv_inp_0", "local_conv_inp_1", "local_conv_attn_op_projection"]
        dense += ["separable_conv1d/pointwise_dense"]
        tap = "lightwt_depthwise_dense_{}"
        if self.kind == "dynamic":
            tap = "dyn_conv_depthwise_dense_{}"
            dense += [tap.format(i) for i in range(taps)]
        shapes = {f"{name}/kernel": (d, d) for name in dense}
        shapes |= {f"{name}/bias": (d,) for name in dense}
        if self.kind == "light":
            shapes |= {f"{tap.format(i)}/kernel": (d,) for i in range(taps)}
        return shapes | {"separable_conv1d/depthwise_conv_hack/depthwise_dense_0/bias": (d,)}

    def _read(self):
        return dict.fromkeys("qkvo", (self.d_model, self.d_model))

    def _feed(self):
        first = ("wi_0", "wi_1") if self.gated else ("wi",)
        shapes = {f"{name}/kernel": (self.d_model, self.d_ff) for name in first}
        return shapes | {"wo/kernel": (self.d_ff, self.d_model)}

    def __call__(self, source, tokens):
        """(encoder's output, logits) of ids [B, S] and [B, T], as NumPy arrays."""
        with torch.no_grad():
            self._v = {name: torch.tensor(array) for name, array in self.variables.items()}
            source, tokens = torch.tensor(source), torch.tensor(tokens)
            memory = self._stack("encoder", source, None, None)
            hidden = self._stack("decoder", tokens, memory, source != PAD)
            if "decoder/logits/kernel" in self._v:
                logits = hidden @ self._v["decoder/logits/kernel"]
            else:
                logits = (hidden * self.d_model**-0.5) @ self._v["shared/embedding"].T
        return memory.numpy(), logits.numpy()

    def greedy(self, source, length):
        """[B, length], from 0 to the end mark, which the last one is, padding behind it."""
        tokens = np.zeros((len(source), 1), np.int64)
        done = np.zeros(len(source), bool)
        while tokens.shape[1] < length:
            _, logits = self(source, tokens)
            logits[:, -1, PAD] = -math.inf
            best = logits[:, -1].argmax(-1)
            if tokens.shape[1] == length - 1:
                best[:] = END
            best[done] = PAD
            done |= best == END
            tokens = np.concatenate([tokens, best[:, None]], 1)
        return tokens

    def _stack(self, side, ids, memory, seen):
        x = self._v["shared/embedding"][ids]
        if "shared/positional_embedding" in self._v:
            x = x + self._v["shared/positional_embedding"][: ids.shape[1]]
        for block in range(self.layers[side == "decoder"]):
            for number, (layer, _) in enumerate(self._layers(side)):
                at = f"{side}/block_{block:03d}/layer_{number:03d}"
                y = self._norm(f"{at}/{self.norms[0]}", x)
                if layer == "LocalConvAttnBlock":
                    y = self._convolve(f"{at}/{layer}", y, ids, side)
                elif layer == "EncDecAttention":
                    y = self._attend(f"{at}/{layer}", y, memory, seen)
                else:
                    y = self._feed_forward(f"{at}/{layer}", y)
                x = x + y
        return self._norm(f"{side}/{self.norms[1]}", x)

    def _norm(self, name, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self._v[f"{name}/scale"]

    def _dense(self, name, x):
        return x @ self._v[f"{name}/kernel"] + self._v[f"{name}/bias"]

    def _convolve(self, at, x, ids, side):
        value = self._dense(f"{at}/local_conv_inp_0", x)
        x = value * torch.sigmoid(self._dense(f"{at}/local_conv_inp_1", x))
        name = f"{at}/{'lightwt' if self.kind == 'light' else 'dyn_conv'}_depthwise_dense_"
        taps = [
            self._v[f"{name}{i}/kernel"] if self.kind == "light" else self._dense(f"{name}{i}", x)
            for i in range(self.taps[side])
        ]
        taps = torch.softmax(torch.stack(taps), 0)
        x = x * (ids != PAD)[..., None]  # in the decoder also what it begins with, whose id is 0
        count = len(taps)
        first = -(count - 1) if side == "decoder" else -(count // 2)
        padded = torch.nn.functional.pad(x, (0, 0, -first, first + count - 1))
        length = x.shape[1]
        mixed = sum(tap * padded[:, i : i + length] for i, tap in enumerate(taps))
        separable = f"{at}/separable_conv1d"
        mixed = mixed + self._v[f"{separable}/depthwise_conv_hack/depthwise_dense_0/bias"]
        mixed = self._dense(f"{separable}/pointwise_dense", mixed)
        return self._dense(f"{at}/local_conv_attn_op_projection", mixed)

    def _attend(self, at, x, memory, seen):
        def split(y, name):
            return (y @ self._v[f"{at}/{name}"]).unflatten(-1, (-1, self.d_kv)).transpose(1, 2)

        query, key, value = split(x, "q"), split(memory, "k"), split(memory, "v")
        scores = query @ key.transpose(-1, -2)  # not divided by sqrt(d_kv)
        weights = scores.masked_fill(~seen[:, None, None], -1e9).softmax(-1)
        return (weights @ value).transpose(1, 2).flatten(2) @ self._v[f"{at}/o"]

    def _feed_forward(self, at, x):
        if not self.gated:
            return torch.relu(x @ self._v[f"{at}/wi/kernel"]) @ self._v[f"{at}/wo/kernel"]
        inner = torch.nn.functional.gelu(x @ self._v[f"{at}/wi_0/kernel"], approximate="tanh")
        return (inner * (x @ self._v[f"{at}/wi_1/kernel"])) @ self._v[f"{at}/wo/kernel"]


def slots(variables):
    """What Adafactor keeps of variables: row and column means of matrices, else a mean square."""
    found = {}
    for name, array in variables.items():
        if array.ndim == 2:
            found[f"{name}_slot_vr"] = np.zeros(array.shape[:1], np.float32)
            found[f"{name}_slot_vc"] = np.zeros(array.shape[1:], np.float32)
        else:
            found[f"{name}_slot_v"] = np.zeros(array.shape, np.float32)
    return found


def write(folder: Path, model: Published, changed=None) -> Path:
    """A checkpoint as T5's training leaves it; `changed` variables, None for one that is not there.

    Returns:
      its prefix.
    """
    prefix = folder / f"model.ckpt-{STEP}"
    sizes = {
        "d_kv": model.d_kv,
        "after": model.taps["encoder"] // 2,
        "before": model.taps["decoder"] - 1,
    }
    (folder / "operative_config.gin").write_text(GIN.format(**sizes))
    variables = model.variables | slots(model.variables) | {"global_step": np.int64(STEP)}
    variables |= changed or {}
    write_bundle(prefix, {name: array for name, array in variables.items() if array is not None})
    return prefix
