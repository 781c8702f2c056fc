"""Checkpoints of Mesh TensorFlow that are not whole, of another model or damaged are refused in one
sentence, and the sizes of the published ones are what their code makes them.
"""

import os
import random
import re

import jax
import numpy as np
import pytest
from flax import nnx

from convbert_jax.config import UserError
from convbert_jax.config.sequences import derive_encoder_decoder
from convbert_jax.interop.mesh_tensorflow.model import read
from convbert_jax.interop.mesh_tensorflow.outline import derive_outline
from convbert_jax.models.sequences.networks import EncoderDecoder
from convbert_jax.training.state import flatten

torch = pytest.importorskip("torch")

from tests.interop.mesh_tensorflow.published import GIN, Published, write  # noqa: E402

FLIPS = int(os.environ.get("CONVBERT_FLIPS", "60"))
LAYER = "encoder/block_001/layer_000"
CONV = f"{LAYER}/LocalConvAttnBlock"


def refused(path):
    """The sentence that refuses a checkpoint."""
    with pytest.raises(UserError) as found:
        read(path)
    text = str(found.value)
    assert "\n" not in text
    assert len(text) < 500
    assert str(path) in text
    return text


@pytest.fixture(scope="module")
def theirs():
    return Published(words=128, d_model=16, d_ff=24, d_kv=8)


@pytest.fixture(scope="module")
def renamed(theirs):
    """As T5's own checkpoints are called."""

    def of_t5(name):
        return name.replace("LocalConvAttnBlock/local_conv_inp_0/kernel", "SelfAttention/q")

    return {of_t5(name): array for name, array in theirs.variables.items() if "Conv" not in name}


CHANGES = {
    "missing": (
        {f"{CONV}/local_conv_inp_1/bias": None},
        r"lacks .*block_001.*local_conv_inp_1/bias",
    ),
    "a tap": ({f"{CONV}/lightwt_depthwise_dense_3/kernel": None}, "lacks .*dense_3/kernel"),
    "foreign": ({"decoder/adapter/kernel": np.zeros((2, 2), np.float32)}, "has no place .*adapter"),
    "no table": ({"shared/embedding": None}, "lacks the variable shared/embedding"),
    "shape": (
        {f"{CONV}/local_conv_inp_1/kernel": np.zeros((16, 8), np.float32)},
        r"local_conv_inp_1/kernel has the shape \(16, 8\); the others make it \(16, 16\)",
    ),
    "no number": (
        {f"{LAYER}/layer_norm/scale": np.full(16, np.nan, np.float32)},
        "has NaN or infinity in 1 of 1 arrays, first .*layer_norm/scale",
    ),
    "type": (
        {f"{LAYER}/layer_norm/scale": np.ones(16)},
        "layer_norm/scale is float64, which float32 cannot hold",
    ),
    "another encoder": (
        {f"{LAYER}/SelfAttention/q": np.zeros((16, 16), np.float32)},
        "this is T5's Transformer, whose relative positions are not here",
    ),
    "experts": (
        {f"{LAYER}/MoE1D/wi/kernel": np.zeros((2, 16, 16), np.float32)},
        "its layers are MoE1D, of which there is no counterpart",
    ),
    "no number of a block": (
        {f"encoder/block_{'9' * 90}/x": np.ones(3, np.float32)},
        "has no place here for 'encoder/block_999.*…",
    ),
    "gap": (
        {f"encoder/block_007/layer_000/{name}": np.ones(16, np.float32) for name in ("a", "b")},
        "has 3 parts of encoder, up to number 7",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_this_model_is_named(theirs, tmp_path, change):
    changed, sentence = CHANGES[change]
    text = refused(write(tmp_path, theirs, changed))
    assert re.search(sentence, text), text


def test_an_even_number_of_taps_in_the_encoder_is_refused(tmp_path):
    even = Published(d_model=16, d_ff=24, d_kv=8, taps=(4, 4))
    assert "its encoder has 4 taps" in refused(write(tmp_path, even))


def test_other_checkpoints_are_named(theirs, tmp_path):
    other = dict.fromkeys(theirs.variables) | {"bert/embeddings/x": np.ones(3, np.float32)}
    assert "holds no encoder-decoder of Mesh TensorFlow" in refused(write(tmp_path, theirs, other))
    (tmp_path / "other").mkdir()
    assert "is no TensorFlow checkpoint" in refused(tmp_path / "other")


SETTINGS = {
    "unit_scaling_convention.value = False": "unit_scaling_convention.value = True",
    "sublayer_rms_norm.epsilon = 1e-06": "sublayer_rms_norm.epsilon = 1e-05",
    "EncDecAttention.shared_kv = False": "EncDecAttention.shared_kv = True",
    "min_relative_pos = -4": "min_relative_pos = -8",
    "d_kv = 8": "d_kv = 5",
}


@pytest.mark.parametrize("was", SETTINGS)
def test_settings_that_compute_something_else_are_refused(theirs, tmp_path, was):
    prefix = write(tmp_path, theirs)
    gin = GIN.format(d_kv=8, after=4, before=8)
    assert was in gin
    prefix.with_name("operative_config.gin").write_text(gin.replace(was, SETTINGS[was]))
    text = refused(prefix)
    assert SETTINGS[was].rpartition(" ")[2].removeprefix("-") in text


def test_without_its_settings_heads_are_64_wide(tmp_path):
    prefix = write(tmp_path, Published(d_model=128, d_ff=16, d_kv=64, layers=(1, 1)))
    prefix.with_name("operative_config.gin").unlink()
    assert read(prefix).model.heads == 2


def test_bfloat16_is_read(theirs, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    name = f"{LAYER}/layer_norm/scale"
    short = theirs.variables[name].astype(ml_dtypes.bfloat16)
    found = read(write(tmp_path, theirs, {name: short}))
    scales = flatten(found.params)["encoder/stages/0/mixer_norm/scale"]
    np.testing.assert_array_equal(scales[1], short.astype(np.float32))


def test_a_flipped_bit_is_refused_or_changes_nothing(theirs, tmp_path):
    prefix = write(tmp_path, theirs)
    sound = flatten(read(prefix).params)
    files = [path for path in tmp_path.iterdir() if path.suffix != ".gin"]
    rng, refusals = random.Random(0), 0
    for _ in range(FLIPS):
        path = rng.choice(files)
        content = path.read_bytes()
        place = rng.randrange(len(content) * 8)
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = flatten(read(prefix).params)
        except UserError:
            refusals += 1
        else:  # in what Adafactor keeps
            for name, array in sound.items():
                np.testing.assert_array_equal(found[name], array)
        path.write_bytes(content)
    assert refusals > FLIPS / 4


def test_cut_off_it_is_refused(theirs, tmp_path):
    prefix = write(tmp_path, theirs)
    data = prefix.with_name(prefix.name + ".data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:-9])
    assert "cut off" in refused(prefix)


# --- Sizes ---

# Layers of each side, channels, inside of the feed-forward: T5's small, and bi_bert_base.gin and
# bi_bert_large.gin, whose layers are replaced by lconv.gin and dconv.gin.
SIZES = {"small": (6, 512, 2048), "base": (12, 768, 3072), "large": (24, 1024, 4096)}
# Parameters by that code, without a table of positions (512 more rows); and the published millions.
PUBLISHED = {
    ("light", "small"): (60_592_128, 67),
    ("light", "base"): (223_160_832, 210),
    ("light", "large"): (738_355_200, 741),
    ("dynamic", "base"): (350_562_816, 324),
    ("dynamic", "large"): (1_191_340_032, 1200),
}
WORDS, TAPS = 32_128, 9


def on_paper(kind, layers, c, f):
    """Table; of each side convolution, feed-forward and norms; of the decoder attention too."""
    conv = 4 * (c * c + c) + c + TAPS * (c if kind == "light" else c * c + c)
    encoder, decoder = conv + 2 * c * f + 2 * c, conv + 4 * c * c + 2 * c * f + 3 * c
    return WORDS * c + layers * (encoder + decoder) + 2 * c


@pytest.mark.parametrize(("kind", "size"), PUBLISHED)
def test_published_sizes(kind, size):
    layers, c, f = SIZES[size]
    named = Published(kind, words=1, d_model=1, d_ff=1, d_kv=1, layers=(layers, layers))
    special = {"shared/embedding": (WORDS, c)}
    shapes = {name: special.get(name, (c,) * a.ndim) for name, a in named.variables.items()}
    for name in shapes:
        shapes[name] = (c, f) if "/wi/" in name else (f, c) if "/wo/" in name else shapes[name]
    outline = derive_outline(shapes, {"d_kv": "64"})
    config = derive_encoder_decoder(outline.model, outline.sequence, WORDS, WORDS)
    model = nnx.eval_shape(lambda: EncoderDecoder(config, nnx.Rngs(0)))
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    theirs = sum(int(np.prod(shape)) for shape in shapes.values())
    assert count == theirs == on_paper(kind, layers, c, f) == PUBLISHED[kind, size][0]
    # The large ones follow from the published code; the others do not, see docs/weights.md.
    away = count / 1e6 / PUBLISHED[kind, size][1] - 1
    assert away == pytest.approx({"small": -0.09, "base": 0.07, "large": 0.0}[size], abs=0.02)
