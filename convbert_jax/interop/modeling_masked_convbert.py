"""ConvBERT classes for transformers whose convolutions ignore padding.

In the classes of transformers, only attention uses the attention mask. Its convolutions read the
hidden states of padding, so the outputs of a text depend on the length of its batch. These classes
have the same parameters and outputs that do not depend on padding.

An exported folder contains a copy of this file, which is used by
`AutoModel.from_pretrained(FOLDER, trust_remote_code=True)`. It imports only torch and transformers.
"""

import math

import torch
from torch import nn
from transformers import (
    ConvBertForMaskedLM,
    ConvBertForQuestionAnswering,
    ConvBertForSequenceClassification,
    ConvBertForTokenClassification,
    ConvBertModel,
)
from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention


class MaskedSelfAttention(ConvBertSelfAttention):
    """Attention and convolution heads; a convolution reads zeros in place of padding."""

    def forward(self, hidden_states, attention_mask=None, *_, **__):
        """Computes the block.

        Args:
          hidden_states: [B, L, C].
          attention_mask: [B, 1, 1 or L, L], 0 at tokens and negative at padding; None without
            padding.

        Returns:
          (outputs [B, L, C], attention probabilities [B, H, L, L]).
        """
        batch, length, _ = hidden_states.shape
        heads, taps = self.num_attention_heads, self.conv_kernel_size

        def split(x):  # [B, L, H * D] -> [B, H, L, D]
            return x.view(batch, length, heads, -1).transpose(1, 2)

        query, values = self.query(hidden_states), self.conv_out_layer(hidden_states)
        around = hidden_states
        if attention_mask is not None:
            real = (attention_mask[:, 0, :1] == 0).transpose(1, 2).to(hidden_states.dtype)
            around, values = around * real, values * real
        span = self.key_conv_attn_layer(around.transpose(1, 2)).transpose(1, 2)
        filters = split(self.conv_kernel_layer(span * query)).softmax(-1)
        padded = nn.functional.pad(split(values), (0, 0, taps // 2, taps // 2))
        convolved = sum(
            filters[..., tap : tap + 1] * padded[:, :, tap : tap + length] for tap in range(taps)
        )
        scores = split(query) @ split(self.key(hidden_states)).transpose(-1, -2)
        scores = scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probabilities = self.dropout(scores.softmax(-1))
        attended = probabilities @ split(self.value(hidden_states))
        return torch.cat([attended, convolved], 1).transpose(1, 2).flatten(2), probabilities


class _Masked:
    """Replaces the blocks of a ConvBERT class."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.base_model.encoder.layer:
            layer.attention.self = MaskedSelfAttention(config)


class MaskedConvBertModel(_Masked, ConvBertModel):
    pass


class MaskedConvBertForMaskedLM(_Masked, ConvBertForMaskedLM):
    pass


class MaskedConvBertForSequenceClassification(_Masked, ConvBertForSequenceClassification):
    pass


class MaskedConvBertForTokenClassification(_Masked, ConvBertForTokenClassification):
    pass


class MaskedConvBertForQuestionAnswering(_Masked, ConvBertForQuestionAnswering):
    pass
