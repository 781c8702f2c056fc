"""Our networks and transformers' classes of the same shape, with the same weights."""

import dataclasses

MIXERS = ("attention", "light", "dynamic")
WORDS, PAD, START, END = 8_000, 0, 2, 3
SIZES = {
    "small": dict(hidden_size=256, embedding_size=128, heads=4, ffn_size=1024),
    "base": dict(hidden_size=768, embedding_size=768, heads=12, ffn_size=3072),
}


def make_encoders(size: str, layers: int, unroll: int):
    """Returns (our f(params, tokens, dtype), parameters, ConvBertModel, vocabulary size)."""
    import jax
    import jax.numpy as jnp
    import torch
    import transformers
    from flax import nnx

    from convbert_jax.config import Config
    from convbert_jax.models.embeddings import Embeddings
    from convbert_jax.models.encoder import Encoder
    from tests.parity.pytorch_weights import read

    more = {"layers": layers, "mask_convolution": False, "scan_unroll": unroll}
    model = dataclasses.replace(Config().model, **SIZES[size], **more)
    config = dataclasses.replace(Config(), model=model)
    torch.manual_seed(0)
    theirs = transformers.ConvBertModel(
        transformers.ConvBertConfig(
            vocab_size=config.tokenizer.vocab_size,
            embedding_size=model.embedding_size,
            num_hidden_layers=model.layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.heads,
            intermediate_size=model.ffn_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).eval()
    named = {name: p.detach().numpy().copy() for name, p in theirs.named_parameters()}

    def build():
        starts, rngs = jax.nn.initializers.zeros, nnx.Rngs(0)
        return nnx.Dict(
            embeddings=Embeddings(config.embeddings, starts, rngs),
            encoder=Encoder(config.encoder, rngs),
        )

    graphdef = nnx.graphdef(nnx.eval_shape(build))

    def encode(params, tokens, dtype):
        parts, ids = nnx.merge(graphdef, params), jnp.ones_like(tokens)
        embedded = parts["embeddings"](tokens, ids, jnp.zeros_like(tokens), dtype=dtype)
        return parts["encoder"](embedded, ids).astype(jnp.float32)

    return encode, read(model.layers, named), theirs, config.tokenizer.vocab_size


def make_marian(positions: int):
    """Returns a Transformer with the shape of `tiny` and our sinusoids."""
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from configs.written import SIZES
    from convbert_jax.models.embeddings import sinusoids

    model, _ = SIZES["tiny"]("attention")
    torch.manual_seed(0)
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {
            f"{side}_layers": model.layers,
            f"{side}_attention_heads": model.heads,
            f"{side}_ffn_dim": model.ffn_size,
        }
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        d_model=model.hidden_size,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=positions,
        pad_token_id=PAD,
        eos_token_id=END,
        forced_eos_token_id=END,
        decoder_start_token_id=START,
        bos_token_id=None,
        **sides,
    )
    made = transformers.MarianMTModel(config).eval()
    places = torch.tensor(np.asarray(sinusoids(jnp.arange(positions), model.hidden_size)))
    for side in (made.model.encoder, made.model.decoder):
        side.embed_positions.weight.data.copy_(places)
    return made


def make_translation(mixer: str, theirs):
    """Returns (static part, parameters) of `tiny`; the Transformer gets PyTorch's weights."""
    import jax
    from flax import nnx

    from configs.written import SIZES
    from convbert_jax.config.network import derive_encoder_decoder
    from convbert_jax.interop.fairseq import to_parameters
    from convbert_jax.models.networks import EncoderDecoder

    model, sequence = SIZES["tiny"](mixer)
    sequence = dataclasses.replace(sequence, norm="post")
    config = derive_encoder_decoder(model, sequence, WORDS, WORDS)
    model = EncoderDecoder(config, nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if mixer == "attention":
        named = {
            name.removeprefix("model."): value.detach().numpy()
            for name, value in theirs.state_dict().items()
            if "embed_positions" not in name and name not in ("final_logits_bias", "lm_head.weight")
        }
        word = named.pop("shared.weight")
        named |= {f"{side}.embed_tokens.weight": word for side in ("encoder", "decoder")}
        params = jax.tree.map(jax.numpy.asarray, to_parameters(named, config))
    return graph, params


def run_translation(graph, params, source, target):
    import jax.numpy as jnp
    from flax import nnx

    ones = jnp.ones_like(source)
    return nnx.merge(graph, params)(source, ones, target, jnp.ones_like(target))


def make_language_model(mixer: str, layers: int, width: int):
    """Returns (static part, parameters) of a pre-norm language model."""
    from flax import nnx

    import convbert_jax
    from convbert_jax.config.network import derive_language_model
    from convbert_jax.models.networks import LanguageModel

    config = convbert_jax.load_config(
        f"configs/language_model.py:tiny,{mixer}",
        **{
            "model.layers": layers,
            "model.hidden_size": width,
            "model.embedding_size": width,
            "model.ffn_size": 4 * width,
            "model.heads": width // 64,
            "model.kernel_sizes": () if mixer == "attention" else (7,) * layers,
        },
    )
    model = LanguageModel(derive_language_model(config.model, config.sequence, WORDS), nnx.Rngs(0))
    return nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))


def make_gpt2(params, layers: int, width: int, positions: int):
    """Returns GPT-2 with our weights and our sinusoids as its position table.

    Ours scales input embeddings by sqrt(C), but not the output projection, so GPT-2's two tables
    are not tied.
    """
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from convbert_jax.models.embeddings import sinusoids

    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=positions,
            n_embd=width,
            n_layer=layers,
            n_head=width // 64,
            n_inner=4 * width,
            activation_function="relu",
            layer_norm_epsilon=1e-5,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    ).eval()
    word = np.asarray(params["target"]["word"]["embedding"])
    places = sinusoids(jnp.arange(positions), width)
    named = {
        "transformer.wte.weight": word * width**0.5,
        "transformer.wpe.weight": places,
        "lm_head.weight": word,
        "transformer.ln_f.weight": params["decoder"]["norm"]["scale"],
        "transformer.ln_f.bias": params["decoder"]["norm"]["bias"],
    }
    stack = params["decoder"]["stages"]["0"]
    for n in range(layers):
        of_layer = f"transformer.h.{n}."
        mixer, inner = stack["mixer"], stack["feed_forward"]
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            three = [mixer[part][kind][n] for part in ("query", "key", "value")]
            named[f"{of_layer}attn.c_attn.{name}"] = np.concatenate(three, axis=-1)
            named[f"{of_layer}attn.c_proj.{name}"] = mixer["output"][kind][n]
            named[f"{of_layer}mlp.c_fc.{name}"] = inner["intermediate"][kind][n]
            named[f"{of_layer}mlp.c_proj.{name}"] = inner["output"][kind][n]
        for kind, name in (("scale", "weight"), ("bias", "bias")):
            named[f"{of_layer}ln_1.{name}"] = stack["mixer_norm"][kind][n]
            named[f"{of_layer}ln_2.{name}"] = stack["feed_forward_norm"][kind][n]
    made.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in named.items()})
    return made
