"""A checkpoint of Mesh TensorFlow as a run: it writes, another trains on from it, or is refused."""

import dataclasses
import io

import jax.numpy as jnp
import numpy as np
import pytest
import sentencepiece

import convbert_jax
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, check_tokenizer, follow_file
from convbert_jax.decoding import greedy
from convbert_jax.interop.matching import replace, value_of
from convbert_jax.interop.mesh_tensorflow.model import END, PAD, read
from convbert_jax.interop.mesh_tensorflow.vocabulary import fill_up
from convbert_jax.interop.networks import ConversionError
from convbert_jax.interop.runs import sequences

torch = pytest.importorskip("torch")

from tests.interop.mesh_tensorflow.published import Published, write  # noqa: E402

TEXT, ROWS = 120, 256  # entries of the vocabulary's file, rows of the table
LINES = [
    f"{a} {b} is {c}, and the {d} of it"
    for a in ("The", "A", "No")
    for b in ("river", "town", "letter", "day")
    for c in ("long", "small", "Red", "unknown")
    for d in ("end", "name", "Älteste", "half")
]


def config_of(**fields):
    config = convbert_jax.load_config("configs/text_to_text.py:tiny,light")
    return replace(config, {"train.compile_cache": "", "decoding.length_extra": 20} | fields)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """As T5's file is: padding, </s>, <unk> and pieces; no sentinels."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=TEXT, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, model_type="unigram", hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="nmt_nfkc",
    )  # fmt: skip
    path = tmp_path_factory.mktemp("vocabulary") / "sentencepiece.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def checkpoint(vocabulary, tmp_path_factory):
    theirs = Published("dynamic", words=ROWS, d_model=16, d_ff=24, d_kv=8, places=512)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary)).get_piece_size()
    theirs.variables["shared/embedding"][pieces:] = 0  # so that it writes text
    theirs.variables["shared/embedding"][END] *= 0.2
    return write(tmp_path_factory.mktemp("release"), theirs)


@pytest.fixture(scope="module")
def imported(checkpoint, vocabulary, tmp_path_factory):
    place = tmp_path_factory.mktemp("imported") / "run"
    config = config_of(**{"tokenizer.path": str(vocabulary)})
    return sequences.import_run(str(checkpoint), config, place, {"tokenizer.path"}), place


def test_it_writes_as_it_is(checkpoint, imported):
    """The same texts as of a search by hand over the model that was read."""
    config, place = imported
    assert (config.tokenizer.vocab_size, config.model.positions) == (ROWS, 512)
    model = convbert_jax.load(str(place))
    net, tokenizer = read(checkpoint).build(), model.tokenizers[0]
    never = sorted(set(tokenizer.special.by_name.values()) - {END})

    def by_hand(text):
        ids = jnp.asarray([[*tokenizer.encode([text])[0], END]])
        state, source = net.start(ids, jnp.ones_like(ids), copies=1, length=24)
        best = greedy(
            lambda *at: net.step(*at, source), state, jnp.zeros((1, 1), int), length=24, end=END,
            pad=PAD, never=never, limits=jnp.asarray([22]),
        )  # fmt: skip
        written = np.asarray(best.tokens[0, 1:]).tolist()
        return tokenizer.decode(written[: written.index(END)])

    texts = [LINES[0], LINES[50], LINES[99], "half of it", "Red town", "letter"]
    ours = model.write(texts)
    assert ours == [by_hand(text) for text in texts]
    assert any(ours)


def test_the_vocabulary_is_t5s_with_its_sentinels(vocabulary, imported):
    config, place = imported
    tokenizer = Tokenizer(config.tokenizer, place / "vocabulary" / "words.model")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(vocabulary))
    text = "The Älteste is <extra_id_0> [MASK] </s> unknown"
    assert tokenizer.encode([text])[0] == theirs.encode(text)
    special, size = tokenizer.special, theirs.get_piece_size()
    assert (special.pad, special.cls, special.sep, special.unknown) == (0, 0, 1, 2)
    assert special.mask == size + 100
    assert special.sentinels == tuple(range(size + 99, size - 1, -1))
    assert tokenizer.vocab_size == len(set(tokenizer.entries)) == ROWS
    check_tokenizer(tokenizer, LINES)
    assert follow_file(config.tokenizer) == config.tokenizer
    whole = fill_up(vocabulary.read_bytes(), ROWS)
    assert whole == (place / "vocabulary" / "words.model").read_bytes()


def test_another_run_trains_on_from_it(imported, tmp_path):
    _, place = imported
    rows = [f"{line}\t{line.split()[1]}\n" for line in LINES]
    (tmp_path / "pairs.tsv").write_text("".join(rows))
    fields = {
        "init_from": str(place),
        "parallel.source": f"tsv:{tmp_path / 'pairs.tsv'}",
        "parallel.heldout_fraction": 0.2,
        "parallel.max_length": 64,
        "parallel.batch_tokens": 512,
        "parallel.shapes": 1,
        "train.steps": 4,
        "train.eval_every": 4,
        "train.log_every": 1,
        "optimizer.warmup_steps": 1,
        "checkpoint.every": 4,
        "data.workers": 1,
        "train.compile_cache": "",
        "decoding.length_extra": 8,
    }
    config = convbert_jax.load_config("configs/text_to_text.py:tiny,light")
    result = convbert_jax.pretrain(config, tmp_path / "run", **fields)
    assert result.step == 4
    kept = convbert_jax.load_config(str(result.folder / "config.json"))
    assert kept.model.mixer == "gated_separable"
    assert (kept.sequence.normalization, kept.sequence.biases) == ("rms", False)
    assert kept.model.layer_norm_epsilon == 1e-6
    assert kept.vocabularies == (ROWS, ROWS)


def test_it_may_write_as_mesh_tensorflow_does(checkpoint, vocabulary, tmp_path):
    fields = ("filters=dynamic", "reads_begin=true")
    config = config_of(
        **{"tokenizer.path": str(vocabulary), "sequence.decoder_mixer_fields": fields}
    )
    given = {"tokenizer.path", "sequence.decoder_mixer_fields"}
    config = sequences.import_run(str(checkpoint), config, tmp_path / "run", given)
    assert config.sequence.decoder_mixer_fields == fields
    assert config.encoder_decoder.decoder.stages[0].layer.mixer.reads_begin


def test_only_what_the_checkpoint_states_replaces_the_config(checkpoint, vocabulary, tmp_path):
    """It states no dropout."""
    rates = {
        "model.dropout": 0.25,
        "model.attention_dropout": 0.0,
        "sequence.activation_dropout": 0.5,
        "sequence.last_dropout": 0.75,
    }
    asked = config_of(**{"tokenizer.path": str(vocabulary), "model.remat": "full"} | rates)
    config = sequences.import_run(str(checkpoint), asked, tmp_path / "run", {"model.dropout"})
    assert {path: value_of(config, path) for path in rates} == rates
    assert config.model.remat == "full"


def test_what_does_not_fit_is_refused(checkpoint, vocabulary, imported, tmp_path):
    _, place = imported
    there = {"tokenizer.path": str(vocabulary)}

    def refused(sentence, config, path=tmp_path / "a", given=()):
        with pytest.raises(ConversionError, match=sentence):
            sequences.import_run(str(checkpoint), config, path, given)
        assert path == place or not path.exists()

    refused("holds a run already", config_of(**there), place)
    refused(r"has no vocabulary, .*config\.tokenizer\.path", config_of())
    refused(
        "sentencepiece.none cannot be read", config_of(**{"tokenizer.path": "sentencepiece.none"})
    )
    asked = config_of(**there, **{"model.ffn_size": 48})
    refused(r"config\.model\.ffn_size=48 .* 24", asked, given={"model.ffn_size"})
    light = config_of(**there, **{"sequence.decoder_mixer_fields": ("reads_begin=true",)})
    refused(
        "decoder_mixer_fields=.*filters=dynamic", light, given={"sequence.decoder_mixer_fields"}
    )
    spans = convbert_jax.load_config("configs/span_corruption.py:tiny,light")
    spans = replace(spans, there)
    refused("reads rows as T5 makes them", spans)
    language = dataclasses.replace(config_of(**there), recipe="causal_lm")
    refused("is an encoder-decoder", language)


def test_other_vocabularies_are_refused(vocabulary, imported, tmp_path):
    content = vocabulary.read_bytes()
    with pytest.raises(ConversionError, match=r"sentinels make a table of 256 rows, .* has 384"):
        fill_up(content, 384)
    with pytest.raises(ConversionError, match="no SentencePiece model"):
        fill_up(b"\xff" * 40, ROWS)
    _, place = imported
    whole = (place / "vocabulary" / "words.model").read_bytes()
    assert fill_up(whole, ROWS) == whole
    with pytest.raises(ConversionError, match="its sentinels are not its last 100 entries"):
        fill_up(whole.replace(b"<extra_id_7>", b"<extra_id_8>"), ROWS)
    ours = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=ours, vocab_size=36, minloglevel=2
    )
    with pytest.raises(ConversionError, match="its first entries are <unk>, <s>, </s>"):
        fill_up(ours.getvalue(), ROWS)
