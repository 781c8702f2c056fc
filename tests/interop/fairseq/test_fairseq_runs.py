"""A fairseq checkpoint as a run: it translates, initializes other runs, or is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import convbert_jax
from convbert_jax.config import from_config_dict, to_dict
from convbert_jax.data.errors import TokenizerError
from convbert_jax.data.tokenizer.normalization import check_tokenizer
from convbert_jax.data.tokenizer.tokenizer import Tokenizer, follow_file
from convbert_jax.decoding import search
from convbert_jax.interop.fairseq import read
from convbert_jax.interop.importing import import_fairseq
from convbert_jax.interop.matching import replace
from convbert_jax.interop.networks import ConversionError
from tests.interop.fairseq.checkpoints import arguments, build, write
from tests.refusals import refused

pytestmark = pytest.mark.parity
SIZES = (40, 32)  # words in the two dictionaries


def config_of(recipe="translation", **fields):
    values = to_dict(convbert_jax.load_config("configs/translation.py:tiny,dynamic"))
    values |= {"recipe": recipe}
    config = replace(from_config_dict(values), {"train.compile_cache": "", "decoding.average": 1})
    return replace(config, {name.replace("__", "."): v for name, v in fields.items()})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A released folder: model.pt and two dictionaries."""
    a = arguments(decoder_layers=2, decoder_kernel_size_list=[3, 4])
    place = tmp_path_factory.mktemp("fairseq")
    write(place, build(a, SIZES), a, SIZES)
    return place


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("imported") / "run"
    return import_fairseq(str(folder), config_of(), place), place


def test_it_translates_as_it_is(folder, imported):
    """Compares with a direct beam search over the imported model."""
    _, place = imported
    found = read(folder)
    source, target = found.dictionaries
    text = " ".join(source.entries[i] for i in (9, 5, 30, 11))
    model = convbert_jax.load(str(place))
    ours = model.translate([text], beam=3, length_penalty=0.5)

    special, net = found.special, found.build()
    ids = jnp.asarray([source.encode(text)])
    length = len(model.tokenizers[0].encode([text])[0])
    assert length == 4
    state, kept = net.start(ids, jnp.ones_like(ids), copies=3, length=40)
    never = [special.pad, special.mask, special.unknown]
    decoding = config_of().decoding
    most = int(decoding.length_ratio * 5) + decoding.length_extra + 2
    best = search(
        lambda *at: net.step(*at, kept), state, jnp.full((1, 1), special.cls), beam=3, length=40,
        end=special.sep, pad=special.pad, never=never, alpha=0.5, limits=jnp.asarray([most]),
    )  # fmt: skip
    wanted = target.decode(np.asarray(best.tokens[0, 0]).tolist())
    assert ours == [wanted]


def test_another_run_trains_on_from_it(imported, tmp_path):
    _, place = imported
    rng = np.random.default_rng(0)
    for name in ("source", "target"):
        entries = (place / "vocabulary" / name / f"{name}.pieces").read_text().split()[4:]
        lines = [" ".join(rng.choice(entries, rng.integers(2, 8))) for _ in range(60)]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    fields = {
        "init_from": str(place),
        "parallel.source": f"parallel:{tmp_path / 'source'},{tmp_path / 'target'}",
        "parallel.heldout_fraction": 0.2,
        "parallel.batch_tokens": 256,
        "parallel.shapes": 1,
        "train.steps": 2,
        "train.eval_every": 2,
        "train.log_every": 1,
        "optimizer.warmup_steps": 1,
        "checkpoint.every": 2,
        "data.workers": 1,
    }
    result = convbert_jax.pretrain(config_of(), tmp_path / "run", **fields)
    assert result.step == 2
    assert result.evaluation["token_loss"] > 0
    kept = convbert_jax.load_config(str(result.folder / "config.json"))
    assert kept.tokenizer.kind == "pieces"
    assert kept.vocabularies == SIZES


def test_a_run_that_does_not_fit_is_refused(folder, imported, tmp_path):
    _, place = imported
    with refused(ConversionError, field="--workdir", value=str(place)):
        import_fairseq(str(folder), config_of(), place)
    asked = {
        "config.recipe": config_of("causal_lm"),
        "config.model.ffn_size": config_of(model__ffn_size=48),
        "config.tokenizer.path": config_of(tokenizer__path="mine.model"),
    }
    for field, config in asked.items():
        given = {field.removeprefix("config.")}
        with refused(ConversionError, field=field, path=folder):
            import_fairseq(str(folder), config, tmp_path / "a", given)
    assert not (tmp_path / "a").exists()


def test_only_what_the_checkpoint_states_replaces_the_config(folder, tmp_path):
    fields = {"model.dropout": 0.25, "model.remat": "full", "model.attention_dropout": 0.25}
    asked = replace(config_of(), {**fields, "model.activation_dropout": 0.25})
    named = {"model.dropout", "model.remat", "model.activation_dropout"}
    config = import_fairseq(str(folder), asked, tmp_path / "run", named)
    assert config.model.dropout == config.model.activation_dropout == 0.25
    assert config.model.attention_dropout == 0.1  # from the checkpoint
    assert config.model.remat == "full"


def test_pieces_are_a_vocabulary(imported, tmp_path):
    _, place = imported
    path = place / "vocabulary" / "source" / "source.pieces"
    section = follow_file(dataclasses.replace(config_of().tokenizer, path=str(path)))
    assert (section.kind, section.vocab_size) == ("pieces", SIZES[0])
    tokenizer = Tokenizer(section, path)
    assert tokenizer.special.cls == tokenizer.special.sep == 2
    words = tokenizer.entries[4:8]
    ids = tokenizer.encode([" ".join(words) + " </s> never-seen"])[0]
    assert ids == [4, 5, 6, 7, 3, 3]
    own = tmp_path / "own.pieces"
    own.write_text("<s>\n<pad>\n</s>\n<unk>\na\ntokeni@@\nzed\n")
    tokenizer = Tokenizer(dataclasses.replace(section, path=str(own)), own)
    assert tokenizer.decode(tokenizer.encode(["a tokeni@@ zed a"])[0]) == "a tokenized a"
    assert tokenizer.begins_word.tolist() == [0, 0, 0, 1, 1, 0, 1]
    (_, places), *_ = tokenizer.encode_with_offsets(["a  zed"])
    assert places.tolist() == [[0, 1], [3, 6]]
    with refused(TokenizerError, own):
        check_tokenizer(tokenizer, ["These are no pieces of it."])
    own.write_text("a\nb\n")
    with refused(TokenizerError, "<pad>", own):
        Tokenizer(dataclasses.replace(section, path=str(own)), own)
    with refused(convbert_jax.UserError, "tokenizer.kind", "pieces"):
        convbert_jax.load_config("tiny", **{"tokenizer.kind": "pieces"})
