"""What a user sets of a model that writes text, beside config.model."""

import dataclasses

NORMS = ("post", "pre")
ACTIVATIONS = ("relu", "gelu")
POSITIONS = ("sinusoidal", "learned", "none")


@dataclasses.dataclass(frozen=True)
class SequenceSection:
    """Of an encoder-decoder whose encoder config.model describes, and its decoder where nothing
    else is said here; or of a language model, which is one decoder, described by config.model.
    """

    decoder_layers: int = 0  # 0: as many as config.model.layers
    decoder_mixer: str = ""  # "": that of config.model, with its mixer_fields
    decoder_mixer_fields: tuple[str, ...] = ()  # of decoder_mixer
    # taps of each layer of the decoder; (): all have config.model.kernel_size
    decoder_kernel_sizes: tuple[int, ...] = ()
    decoder_dilations: tuple[int, ...] = ()  # the same for dilations
    # post: layer norm behind each residual sum. pre: before each part, and one more at the end;
    # what LightConv's language models need ("not stable" otherwise).
    norm: str = "post"
    # of pre, in the decoder; without it logits are made of what was never normalized, as those of
    # LightConv's language models are
    last_norm: bool = True
    activation: str = "relu"  # relu | gelu, in the feed-forward blocks
    # sinusoidal, of any length | learned, config.model.positions rows | none, which convolutions
    # do not need (Tay et al. 2021)
    positions: str = "sinusoidal"
    shared_vocabulary: bool = True  # one vocabulary and one table for source and target
    tied_output: bool = True  # the target's table is the output's too
