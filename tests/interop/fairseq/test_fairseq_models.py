"""Random checkpoints in fairseq's format, computed in PyTorch and here.

Encoder outputs, logits and greedily decoded tokens must agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convbert_jax.decoding import greedy
from convbert_jax.interop.fairseq import read
from convbert_jax.models.networks import EncoderDecoder, LanguageModel
from tests.interop.fairseq.checkpoints import END, PAD, arguments, build, write

pytestmark = pytest.mark.parity
ROWS, LENGTH = 4, 9
SOURCES, TARGETS = [9, 6, 4, 7], [5, 9, 8, 3]  # row lengths
LIGHT = {"encoder_conv_type": "lightweight", "decoder_conv_type": "lightweight"}
PRE = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNED = {"encoder_learned_pos": True, "decoder_learned_pos": True}
SHARED = {"share_all_embeddings": True}
FORMS = {
    "light, one table, learned places": arguments(
        **LIGHT, **SHARED, **LEARNED, encoder_glu=False, decoder_kernel_size_list=[4, 3, 31]
    ),
    "dynamic, no gates, three tables": arguments(
        encoder_glu=False, decoder_glu=False, decoder_layers=2, decoder_kernel_size_list=[4, 4]
    ),
    "dynamic, pre-norm, learned places": arguments(
        **PRE, **LEARNED, share_decoder_input_output_embed=True
    ),
    "light encoder, dynamic decoder, no places": arguments(
        encoder_conv_type="lightweight", no_token_positional_embeddings=True, decoder_glu=False
    ),
    "Transformer": arguments("transformer_iwslt_de_en", **SHARED),
}
ALONE = {
    "dynamic": arguments("lightconv_lm", **PRE, share_decoder_input_output_embed=True),
    "light": arguments("lightconv_lm_gbw", **PRE, **LIGHT, **LEARNED, decoder_glu=False),
    "Transformer": arguments("transformer_lm", **PRE, activation_fn="gelu"),
}


def rows(lengths, words, seed, left):
    """Return random rows of the given lengths that end in </s>, padded on one side."""
    rng = np.random.default_rng(seed)
    texts = [[*rng.integers(4, words, n - 1), END] for n in lengths]
    pads = [[PAD] * (max(lengths) - n) for n in lengths]
    both = zip(texts, pads, strict=True)
    return np.array([pad + text if left else text + pad for text, pad in both])


def make(folder, a, sizes):
    model = build(a, sizes)
    return model, read(write(folder, model, a, sizes))


def network(found):
    kind = EncoderDecoder if hasattr(found.config, "encoder") else LanguageModel
    graph = nnx.graphdef(nnx.eval_shape(lambda: kind(found.config, nnx.Rngs(0))))
    return functools.partial(nnx.merge, graph), jax.tree.map(jnp.asarray, found.params)


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_decoder_gives_the_same(form, tmp_path):
    a = FORMS[form]
    sizes = (23, 23) if a.share_all_embeddings else (23, 19)
    model, found = make(tmp_path, a, sizes)
    import torch

    lefts, rights = (rows(SOURCES, sizes[0], 1, left) for left in (True, False))
    targets = np.roll(rows(TARGETS, sizes[1], 2, False), 1, axis=1)
    targets[:, 0] = END  # decoder inputs start with </s>
    with torch.no_grad():
        memory, logits = model(torch.tensor(lefts), torch.tensor(targets))
    written = model.greedy(torch.tensor(lefts), ROWS, 12).numpy()

    merge, params = network(found)
    seen = (rights != PAD).astype(np.int32)
    real = np.arange(max(TARGETS)) < np.array(TARGETS)[:, None]

    @jax.jit
    def run(params):
        ours = merge(params)
        state, source = ours.start(jnp.asarray(rights), jnp.asarray(seen), copies=1, length=12)
        texts = greedy(
            lambda *step: ours.step(*step, source), state,
            jnp.full((ROWS, 1), found.special.cls), length=12, end=found.special.sep,
            pad=found.special.pad, never=[found.special.pad],
        )  # fmt: skip
        return (
            ours.encode(jnp.asarray(rights), jnp.asarray(seen)),
            ours(jnp.asarray(rights), seen, jnp.asarray(targets), real.astype(jnp.int32)),
            texts.tokens,
        )

    encoded, ours, texts = run(params)
    np.testing.assert_allclose(
        encoded[seen == 1], memory.numpy()[lefts != PAD], atol=1e-5, rtol=1e-5
    )
    np.testing.assert_allclose(ours[real], logits.numpy()[real], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(texts, written)


@pytest.mark.parametrize("form", ALONE)
def test_a_language_model_gives_the_same(form, tmp_path):
    model, found = make(tmp_path, ALONE[form], (21,))
    import torch

    tokens = np.roll(rows(TARGETS, 21, 3, False), 1, axis=1)
    tokens[:, 0] = END
    real = np.arange(max(TARGETS)) < np.array(TARGETS)[:, None]
    with torch.no_grad():
        _, logits = model(None, torch.tensor(tokens))
    written = model.greedy(None, ROWS, 12).numpy()
    merge, params = network(found)

    @jax.jit
    def run(params):
        ours = merge(params)
        prompt = jnp.full((ROWS, 1), found.special.cls)
        state, read = ours.start(prompt, copies=1, length=12)
        texts = greedy(
            lambda *step: ours.step(*step, read), state, prompt,
            length=12, end=found.special.sep, pad=found.special.pad, never=[found.special.pad],
        )  # fmt: skip
        return ours(jnp.asarray(tokens), real.astype(jnp.int32)), texts.tokens

    ours, texts = run(params)
    np.testing.assert_allclose(ours[real], logits.numpy()[real], atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(texts, written)
    assert len(found.dictionaries) == 1
