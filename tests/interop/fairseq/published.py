"""Reimplementation of fairseq's LightConv, DynamicConv and Transformer in PyTorch.

Follows the papers, with fairseq's parameter names, for tokens [B, T].
"""

import math

import torch
from torch import nn

from tests.interop.fairseq.checkpoints import END, LONGEST, PAD


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.heads = heads

    def forward(self, x, memory, seen):
        """Attend to `memory` [B, S, width] where `seen` [B, T, S] is True."""

        def split(y):
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = (
            split(self.q_proj(x)),
            split(self.k_proj(memory)),
            split(self.v_proj(memory)),
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        weights = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        return self.out_proj((weights @ value).transpose(1, 2).flatten(2))


class Convolution(nn.Module):
    """Light or dynamic convolution; channel c uses the filter of head c // (C / H)."""

    def __init__(self, kind, width, heads, taps):
        super().__init__()
        if kind == "dynamic":
            self.weight_linear = nn.Linear(width, heads * taps, bias=False)
        else:
            self.weight = nn.Parameter(torch.randn(heads, 1, taps))
        self.kind, self.heads, self.taps = kind, heads, taps

    def forward(self, x, before):
        """Convolve x [B, T, C]; `before` taps precede each position."""
        if self.kind == "dynamic":
            filters = self.weight_linear(x).unflatten(-1, (self.heads, self.taps))
        else:
            filters = self.weight[:, 0].expand(*x.shape[:2], -1, -1)
        padded = nn.functional.pad(x, (0, 0, before, self.taps - 1 - before))
        windows = padded.unfold(1, self.taps, 1).unflatten(2, (self.heads, -1))
        return torch.einsum("bthrk,bthk->bthr", windows, filters.softmax(-1)).flatten(2)


class Layer(nn.Module):
    """A layer; `side` is "encoder" or "decoder"; `taps` 0 means self-attention."""

    def __init__(self, a, side, taps, reads):
        super().__init__()
        width, heads = a.decoder_embed_dim, a.decoder_attention_heads
        gate = taps and getattr(a, f"{side}_glu")
        if taps:
            self.linear1 = nn.Linear(width, width * (1 + gate))
            self.conv = Convolution(getattr(a, f"{side}_conv_type"), width, heads, taps)
            self.linear2 = nn.Linear(width, width)
        else:
            self.self_attn = Attention(width, heads)
        self.fc1 = nn.Linear(width, a.decoder_ffn_embed_dim)
        self.fc2 = nn.Linear(a.decoder_ffn_embed_dim, width)
        if taps and side == "encoder":
            self.layer_norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
            self.norms = lambda: list(self.layer_norms)
        else:
            first = "conv_layer_norm" if taps else "self_attn_layer_norm"
            setattr(self, first, nn.LayerNorm(width))
            self.final_layer_norm = nn.LayerNorm(width)
            self.norms = lambda: [getattr(self, first), self.final_layer_norm]
        if reads:
            self.encoder_attn = Attention(width, heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(width)
        self.a, self.side, self.taps, self.gate, self.reads = a, side, taps, gate, reads

    def forward(self, x, real, memory=None, memory_real=None):
        pre = getattr(self.a, f"{self.side}_normalize_before")
        first, last = self.norms()

        def add(x, norm, inner):
            return x + inner(norm(x)) if pre else norm(x + inner(x))

        x = add(x, first, lambda y: self.mix(y, real))
        if self.reads:
            seen = memory_real[:, None, :].expand(-1, x.shape[1], -1)
            x = add(x, self.encoder_attn_layer_norm, lambda y: self.encoder_attn(y, memory, seen))
        active = getattr(torch.nn.functional, getattr(self.a, "activation_fn", "relu"))
        return add(x, last, lambda y: self.fc2(active(self.fc1(y))))

    def mix(self, x, real):
        causal = self.side == "decoder"
        if not self.taps:
            seen = real[:, None, :].expand(-1, x.shape[1], -1)
            seen = torch.ones_like(seen).tril() if causal else seen
            return self.self_attn(x, x, seen)
        x = self.linear1(x)
        if self.gate:
            x = nn.functional.glu(x)
        if not causal:
            x = x * real[..., None]
        return self.linear2(self.conv(x, self.taps - 1 if causal else self.taps // 2))


class Sinusoids(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("_float_tensor", torch.zeros(1))
        self.width = width

    def forward(self, places):
        half = self.width // 2
        waves = torch.exp(-math.log(10_000) / (half - 1) * torch.arange(half))
        angles = places[..., None] * waves
        return torch.cat([angles.sin(), angles.cos()], -1)


class Stack(nn.Module):
    def __init__(self, a, side, words, taps, reads=False, last_norm=True):
        super().__init__()
        width = a.decoder_embed_dim
        self.register_buffer("version", torch.tensor([3.0]))
        self.embed_tokens = nn.Embedding(words, width, padding_idx=PAD)
        if not a.no_token_positional_embeddings:
            learned = getattr(a, f"{side}_learned_pos")
            table = nn.Embedding(LONGEST + 2, width, padding_idx=PAD) if learned else None
            self.embed_positions = table or Sinusoids(width)
        self.layers = nn.ModuleList([Layer(a, side, k, reads) for k in taps])
        if getattr(a, f"{side}_normalize_before") and last_norm:
            self.layer_norm = nn.LayerNorm(width)

    def forward(self, tokens, memory=None, memory_real=None):
        real = tokens != PAD
        x = math.sqrt(self.embed_tokens.embedding_dim) * self.embed_tokens(tokens)
        if hasattr(self, "embed_positions"):
            # positions count only real tokens, wherever the padding is
            x = x + self.embed_positions(real.cumsum(1) * real + PAD)
        for layer in self.layers:
            x = layer(x, real, memory, memory_real)
        return self.layer_norm(x) if hasattr(self, "layer_norm") else x


class Published(nn.Module):
    """An encoder-decoder, or a language model if source_words is 0."""

    def __init__(self, a, words, source_words=0):
        super().__init__()
        alone, convolves = not source_words, a.arch.startswith("lightconv")

        def taps(side):
            layers = getattr(a, f"{side}_layers")
            return getattr(a, f"{side}_kernel_size_list") if convolves else [0] * layers

        if not alone:
            self.encoder = Stack(a, "encoder", source_words, taps("encoder"))
        self.decoder = Stack(
            a, "decoder", words, taps("decoder"), not alone, not (alone and convolves)
        )
        shared = getattr(a, "share_all_embeddings", False)
        if shared:
            self.encoder.embed_tokens = self.decoder.embed_tokens
        tied = shared or a.share_decoder_input_output_embed
        if not tied and convolves:
            self.decoder.embed_out = nn.Parameter(torch.randn(words, a.decoder_embed_dim))
        elif not convolves:
            self.decoder.output_projection = nn.Linear(a.decoder_embed_dim, words, bias=False)
            if tied:
                self.decoder.output_projection.weight = self.decoder.embed_tokens.weight
        self.tied = tied
        for name, parameter in self.named_parameters():  # large values expose mistakes
            if "norm" in name or name.endswith("bias"):
                nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
            elif "embed" in name:
                nn.init.normal_(parameter, 0.0, 0.3)

    def forward(self, source, tokens):
        """Return (encoder output, logits); `source` is None for a language model."""
        if source is None:
            return None, self.words(self.decoder(tokens))
        memory = self.encoder(source)
        return memory, self.words(self.decoder(tokens, memory, source != PAD))

    def words(self, x):
        decoder = self.decoder
        if self.tied:
            return x @ decoder.embed_tokens.weight.T
        if hasattr(decoder, "embed_out"):
            return x @ decoder.embed_out.T
        return decoder.output_projection(x)

    @torch.no_grad()
    def greedy(self, source, rows, length):
        """Decode greedily, like fairseq's search.

        Returns:
          Tokens [rows, length]. Each row starts and ends with </s>, then padding.
        """
        tokens = torch.full((rows, 1), END)
        done = torch.zeros(rows, dtype=bool)
        while tokens.shape[1] < length:
            _, logits = self(source, tokens)
            logits[:, -1, PAD] = -math.inf
            best = logits[:, -1].argmax(-1)
            if tokens.shape[1] == length - 1:
                best[:] = END
            best[done] = PAD
            done |= best == END
            tokens = torch.cat([tokens, best[:, None]], 1)
        return tokens
