"""Whole conversions between runs, folders and checkpoints, and what is refused on the way."""

import dataclasses
import json
import resource
import shutil
import signal

import jax
import numpy as np
import pytest

from convbert_jax.config import UserError, from_config_dict, to_dict
from convbert_jax.data.errors import TokenizerError
from convbert_jax.interop import certificate, conversion, importing, matching, sources
from convbert_jax.interop.huggingface import folder as huggingface
from convbert_jax.interop.huggingface import tokenizer as huggingface_tokenizer
from convbert_jax.interop.networks import ConversionError, split
from convbert_jax.interop.runs.vocabulary import read_tokenizer
from convbert_jax.interop.tensorflow1 import checkpoint as tensorflow1
from convbert_jax.recipes import start as recipes
from convbert_jax.training.checkpoints import reading as checkpoint_reading
from convbert_jax.training.checkpoints import saving as checkpoint
from convbert_jax.workdir import Workdir, WorkdirError
from tests.interop.conftest import assert_same, make_config, random_params


@pytest.fixture(autouse=True)
def without_pytorch(monkeypatch):
    """Loading classes takes seconds; test_pytorch.py compares with them."""
    monkeypatch.setattr(certificate, "pytorch_is_there", lambda: False)


@pytest.fixture(scope="module")
def run(make_run):
    return make_run(mask_convolution=False)


@pytest.fixture(scope="module")
def exported(run):
    return conversion.export(run[0])


def networks_of(folder):
    config = Workdir(folder).read_config()
    return split(config, sources.read_params(Workdir(folder), config)[1])


def plain(config, **fields):
    """The config of a user who does not know the sizes."""
    start = make_config(layers=3, recipe=config.recipe, mask_convolution=False)
    return matching.replace(start, fields)


def test_a_run_as_a_folder(run, exported):
    folder, _ = run
    assert exported == folder / "huggingface" / "step-3"
    source = huggingface.read_folder(exported)
    for name, network in networks_of(folder).items():
        assert_same(network, source.networks[name])
    assert source.extra["main"] == {
        "mask_convolution": False,
        "step": 3,
        "network": "discriminator",
        "generator": True,
    }
    card = (exported / "README.md").read_text()
    assert "read back, equal to the bit" in card
    assert "discriminator_predictions" in card
    assert 'subfolder="generator"' in card
    for place in (exported, exported / "generator"):
        assert (place / "tokenizer.json").is_file()
        assert (place / "spiece.model").is_file()


@pytest.mark.parametrize("form", ["huggingface", "tensorflow1"])
def test_there_and_back(run, tmp_path, form):
    """Run -> folder or checkpoint -> run: every parameter to the bit."""
    folder, config = run
    out = conversion.export(folder, form=form, output=tmp_path / "out")
    imported, report = importing.import_run(str(out), plain(config), tmp_path / "back")
    assert not report.initialized
    assert not report.ignored
    assert imported.encoder == config.encoder
    assert imported.generator_encoder == config.generator_encoder
    assert imported.tokenizer.vocab_size == config.tokenizer.vocab_size
    for name, network in networks_of(tmp_path / "back").items():
        assert_same(networks_of(folder)[name], network)
    tokenizer, _ = read_tokenizer(Workdir(tmp_path / "back"), imported)
    assert tokenizer.entries == read_tokenizer(Workdir(folder), config)[0].entries


@pytest.mark.parametrize(
    ("of", "form"),
    [("huggingface", "tensorflow1"), ("tensorflow1", "huggingface"), ("run", "huggingface")],
)
def test_from_anything_to_anything(run, tmp_path, of, form):
    """One step from each format into each; nothing of ours is asked for in between."""
    folder, _ = run
    source = folder if of == "run" else conversion.export(folder, form=of, output=tmp_path / "a")
    out = conversion.convert(str(source), tmp_path / "b", form=form)
    read = sources.read_source(str(out))
    assert read.kind == form
    assert read.step == 3
    for name, network in networks_of(folder).items():
        assert_same(network, read.networks[name])
    assert read.tokenizer["kind"] == "sentencepiece"


def test_an_exported_run_keeps_the_moments(run, tmp_path):
    folder, config = run
    out = conversion.export(folder, form="tensorflow1", output=tmp_path / "out")
    read = tensorflow1.read_checkpoint(out / "model.ckpt-3")
    zeros = {path: 0 * array for path, array in read.networks["main"].parameters.items()}
    assert_same(
        read.moments[0]["main"], dataclasses.replace(read.networks["main"], parameters=zeros)
    )
    imported, _ = importing.import_run(str(out), plain(config), tmp_path / "back")
    assert checkpoint.list_steps(tmp_path / "back" / "checkpoints") == [3]
    assert imported.encoder == config.encoder


def test_conversion_keeps_the_moments(tmp_path):
    config = make_config(mask_convolution=False)
    parts = split(config, random_params(config))
    moments = tuple(split(config, random_params(config, seed)) for seed in (1, 2))
    tensorflow1.write_checkpoint(tmp_path / "a" / "m", parts, step=70, moments=moments)
    out = conversion.convert(
        str(tmp_path / "a"), tmp_path / "b", form="tensorflow1", with_generator=False
    )
    read = tensorflow1.read_checkpoint(out / "model.ckpt-70")
    assert read.networks.keys() == {"main"}
    assert_same(read.moments[1]["main"], moments[1]["main"])


def test_stablehlo_of_a_run(run, tmp_path):
    out = conversion.export(run[0], form="stablehlo", output=tmp_path / "out")
    assert (out / "encoder.mlir").stat().st_size > 1000


def test_an_official_run_goes_on(run, tmp_path):
    """Step and both moments of Adam come out of a TensorFlow checkpoint."""
    folder, config = run
    parts = networks_of(folder)
    moments = tuple(split(config, random_params(config, seed)) for seed in (1, 2))
    tensorflow1.write_checkpoint(tmp_path / "ckpt" / "m", parts, step=70, moments=moments)
    path = str(read_tokenizer(Workdir(folder), config)[0].path)
    start = plain(config, **{"tokenizer.path": path})
    importing.import_run(str(tmp_path / "ckpt"), start, tmp_path / "run")
    _, arrays = checkpoint_reading.load_arrays(tmp_path / "run" / "checkpoints", 70)
    found = {
        (kind, name.split(f"/{kind}/")[1]): array
        for name, array in arrays.items()
        for kind in ("mu", "nu")
        if f"/{kind}/" in name
    }
    for kind, seed in (("mu", 1), ("nu", 2)):
        expected = random_params(config, seed)["generator"]["stages"]["0"]["mixer"]["query"]
        np.testing.assert_array_equal(
            found[kind, "generator/stages/0/mixer/query/kernel"], expected["kernel"]
        )
    counts = [array for name, array in arrays.items() if name.endswith("/count")]
    assert counts
    assert all(count == 70 for count in counts)


def test_without_a_vocabulary(run, tmp_path):
    folder, config = run
    tensorflow1.write_checkpoint(tmp_path / "m", networks_of(folder), step=70)
    with pytest.raises(ConversionError, match=r"tokenizer\.path=vocab\.txt"):
        importing.import_run(str(tmp_path), plain(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_overwritten(run, exported):
    folder, config = run
    with pytest.raises(ConversionError, match="holds a run already"):
        importing.import_run(str(exported), plain(config), folder)


def test_a_damaged_vocabulary_is_refused(run, exported, tmp_path):
    _, config = run
    vocabulary = tmp_path / "vocab.txt"
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(55))]
    vocabulary.write_text("\r\n".join(entries) + "\r\n")
    start = plain(config, **{"tokenizer.path": str(vocabulary), "tokenizer.kind": "wordpiece"})
    with pytest.raises(TokenizerError, match="CR LF"):
        importing.import_run(str(exported), start, tmp_path / "run")


def test_folders_are_replaced_only_if_they_are_ours(run, tmp_path):
    folder, _ = run
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match="was not exported from here"):
        conversion.export(folder, output=out)
    assert (out / "thesis.txt").exists()
    shutil.rmtree(out)
    for _ in range(2):
        conversion.export(folder, output=out)
    assert not list(tmp_path.glob("*.unfinished"))
    (out / "model.onnx").write_text("made of it")
    with pytest.raises(ConversionError, match=r"has model.onnx, which is not as it was written"):
        conversion.export(folder, output=out)
    (out / "model.onnx").unlink()
    (out / "README.md").write_text("a better card")
    with pytest.raises(ConversionError, match=r"has README.md, which is not as it was written"):
        conversion.export(folder, output=out)
    shutil.copytree(folder, tmp_path / "other")
    with pytest.raises(ConversionError, match="has the export of another model"):
        conversion.export(tmp_path / "other", output=out)
    assert (out / "README.md").read_text() == "a better card"
    with pytest.raises(ConversionError, match="cannot be written"):
        conversion.export(folder, output=folder / "config.json" / "out")


@pytest.mark.parametrize("form", ["huggingface", "tensorflow1", "stablehlo"])
def test_a_full_disk_is_a_sentence(run, tmp_path, form):
    """A limit on the size of files stands in for it; what was there is kept."""
    out = tmp_path / "out"
    conversion.export(run[0], form=form, output=out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))
    try:
        with pytest.raises(ConversionError, match=r"out cannot be written \(File too large\)"):
            conversion.export(run[0], form=form, output=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ConversionError, match=r"no run .* no Hugging Face folder"):
        sources.read_source(str(tmp_path))
    with pytest.raises(WorkdirError, match="holds no run"):
        conversion.export(tmp_path)


def test_a_step_that_is_not_there(run):
    with pytest.raises(WorkdirError, match="has no checkpoint of step 4; steps there: 3"):
        conversion.export(run[0], step=4)


def test_a_generator_that_is_asked_for_is_not_left_out(run, make_run, tmp_path):
    """Where the run has none, or the format has no place for one."""
    out = {"output": tmp_path / "out", "with_generator": True}
    with pytest.raises(ConversionError, match="--format=stablehlo has the encoder alone"):
        conversion.export(run[0], form="stablehlo", **out)
    folder, _ = make_run(recipe="masked_lm")
    with pytest.raises(ConversionError, match="has no generator; leave out --generator=true"):
        conversion.export(folder, **out)
    assert not (tmp_path / "out").exists()


def test_formats_are_those_that_there_are(run, tmp_path):
    """Any other name was taken for TensorFlow's; a folder may be text."""
    for write in (conversion.export, lambda path, **how: conversion.convert(path, "out", **how)):
        with pytest.raises(ConversionError, match="form='onnx' is unknown; choose from hugg"):
            write(str(run[0]), form="onnx")
    out = conversion.convert(str(run[0]), str(tmp_path / "out"), form="tensorflow1")
    assert out == tmp_path / "out"
    assert list(out.glob("model.ckpt-*.index"))


def test_the_small_generator_is_left_out_unless_it_is_asked_for(make_run, tmp_path, caplog):
    folder, config = make_run(generator={"size": 0.25})
    with pytest.raises(ConversionError, match=r"the generator .*--generator=false.*release_heads"):
        conversion.export(folder, with_generator=True)
    assert not (folder / "huggingface").exists()
    caplog.clear()
    out = conversion.export(folder)
    assert "The generator is left out: " in caplog.text
    assert "release_heads=false" in caplog.text
    assert not (out / "generator").exists()
    _, report = importing.import_run(str(out), plain(config), tmp_path / "back")
    assert report.initialized
    assert all(path.startswith("generator") for path in report.initialized)


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
        pytest.param({"mixer": "attention"}, marks=pytest.mark.slow),
        {"generator": {"kind": "shared"}},
        pytest.param({"generator": {"tie_embeddings": False}}, marks=pytest.mark.slow),
        pytest.param({"generator": {"kind": "uniform"}}, marks=pytest.mark.slow),
    ],
    ids=["bert", "electra", "shared", "untied", "uniform"],
)
def test_other_kinds_of_runs(make_run, tmp_path, fields):
    folder, config = make_run(**fields)
    out = conversion.export(folder)
    start = matching.replace(config, {"model.layers": 3, "model.ffn_size": 128})
    _, report = importing.import_run(str(out), start, tmp_path / "back")
    assert not report.initialized
    assert not report.ignored
    for name, network in networks_of(tmp_path / "back").items():
        assert_same(networks_of(folder)[name], network)


# --- what must not pass in silence ---


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers(make_run, tmp_path, value):
    def change(params):
        params["generator_head"]["output_bias"][7] = value
        return params

    folder, config = make_run(change=change, mask_convolution=False)
    refused = r"NaN or infinity in 1 of \d+ arrays, first .*output_bias"
    for read in (lambda: conversion.export(folder), lambda: sources.read_source(str(folder))):
        with pytest.raises(ConversionError, match=f"{folder}.*{refused}"):
            read()
    parts = split(config, change(random_params(config)))
    tensorflow1.write_checkpoint(tmp_path / "m", parts, step=70, moments=(parts, parts))
    with pytest.raises(ConversionError, match=f"{tmp_path}.*{refused}"):
        sources.read_source(str(tmp_path))


def test_a_generator_that_is_gone(exported, tmp_path, caplog):
    shutil.copytree(exported, tmp_path / "it")
    (tmp_path / "it" / "generator" / "config.json").unlink()
    with pytest.raises(ConversionError, match=r"generator has no config\.json.*take that folder"):
        sources.read_source(str(tmp_path / "it"))
    shutil.rmtree(tmp_path / "it" / "generator")
    with caplog.at_level("WARNING"):
        assert sources.read_source(str(tmp_path / "it")).networks.keys() == {"main"}
    assert "written with a generator" in caplog.text


@pytest.mark.parametrize("name", ["model.safetensors", "generator/model.safetensors"])
def test_every_flipped_bit_of_an_exported_folder(exported, tmp_path, name):
    shutil.copytree(exported, tmp_path / "it")
    file = tmp_path / "it" / name
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(len(data), size=60):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :])
        with pytest.raises(ConversionError, match="not the file that was written"):
            sources.read_source(str(tmp_path / "it"))


def test_a_flipped_bit_of_its_settings_and_vocabulary(exported, tmp_path, caplog):
    shutil.copytree(exported, tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    file.write_text(file.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    with caplog.at_level("WARNING"):
        sources.read_source(str(tmp_path / "it"))
    assert f"{file} is not as it was written" in caplog.text
    file = tmp_path / "it" / "spiece.model"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ConversionError, match=r"spiece\.model is not the file"):
        sources.read_source(str(tmp_path / "it"))


@pytest.mark.parametrize("path", ["a" * 5_000, "~nobody/at/all", "a\nb"])
def test_paths_that_cannot_be(path):
    with pytest.raises(UserError):
        sources.read_source(path)


# --- config.init_from ---


def start_from(config, exported, **fields):
    path = huggingface_tokenizer.find_vocabulary(exported)
    fields = {"tokenizer.path": str(path)} | fields
    config = dataclasses.replace(config, init_from=str(exported))
    return from_config_dict(to_dict(matching.replace(config, fields)))


OTHER_SIZES = {
    "model.layers": 1,
    "model.hidden_size": 48,
    "model.embedding_size": 24,
    "model.heads": 2,
    "model.ffn_size": 128,
    "model.kernel_size": 5,
    "generator.size": 0.5,
    "generator.kind": "uniform",
    "tokenizer.vocab_size": 5_000,
    "tokenizer.kind": "wordpiece",
    "tokenizer.path": "",
}


@pytest.mark.parametrize("of", ["a run", "huggingface", "tensorflow1"])
def test_sizes_and_vocabulary_are_those_of_the_weights(run, exported, tmp_path, caplog, of):
    folder, config = run
    if of == "tensorflow1":
        exported = conversion.export(folder, form=of, output=tmp_path / "tensorflow1")
    start = start_from(config, folder if of == "a run" else exported, **OTHER_SIZES)
    with caplog.at_level("INFO"):
        found, source = recipes.read_start(start, Workdir(tmp_path))
    assert found.model == dataclasses.replace(
        config.model, mask_convolution=found.model.mask_convolution
    )
    assert found.generator == config.generator
    assert found.tokenizer.vocab_size == config.tokenizer.vocab_size
    assert found.tokenizer.kind == config.tokenizer.kind
    assert "--config.model.heads=4" in caplog.text
    jax.tree.map(
        np.testing.assert_array_equal,
        recipes.fill(found, source),
        sources.read_params(Workdir(folder), config)[1],
    )
    assert recipes.read_start(found, Workdir(tmp_path))[0] == found  # as written to config.json


def test_a_run_that_goes_on_keeps_the_sizes_it_took(run, exported, tmp_path):
    """The command is the same one, and the weights are gone."""
    begun = tmp_path / "begun"
    start = start_from(run[1], exported, **OTHER_SIZES)
    taken = recipes.read_start(start, Workdir(begun))[0]
    with Workdir(begun).open(taken):
        (begun / "checkpoints" / "3").mkdir(parents=True)
    kept = dataclasses.replace(taken, init_from=str(tmp_path / "gone"))
    again = dataclasses.replace(start, init_from=str(tmp_path / "gone"))
    with Workdir(tmp_path / "second").open(kept):
        (tmp_path / "second" / "checkpoints" / "3").mkdir(parents=True)
    assert recipes.read_start(again, Workdir(tmp_path / "second")) == (kept, None)
    assert recipes.read_start(start, Workdir(begun)) == (taken, None)
    other = matching.replace(start, {"model.heads": 2})
    asked = recipes.read_start(other, Workdir(begun), {"model.heads"})[0]
    with (
        pytest.raises(WorkdirError, match=r"config\.model\.heads was 4, now 2"),
        Workdir(begun).open(asked),
    ):
        pass


def test_a_run_starts_from_a_folder(run, exported, tmp_path):
    folder, config = run
    start = start_from(config, exported)
    start, source = recipes.read_start(start, Workdir(tmp_path))
    params = recipes.fill(start, source)
    expected = sources.read_params(Workdir(folder), config)[1]
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    # Once it has checkpoints of its own the source is not asked again.
    assert recipes.read_start(start, Workdir(folder))[1] is None


def test_a_run_starts_from_a_run(run, tmp_path):
    folder, config = run
    path = str(read_tokenizer(Workdir(folder), config)[0].path)
    start = start_from(config, folder, **{"tokenizer.path": path})
    params = recipes.fill(*recipes.read_start(start, Workdir(tmp_path)))
    jax.tree.map(
        np.testing.assert_array_equal, params, sources.read_params(Workdir(folder), config)[1]
    )


def test_other_sizes_are_named_with_the_flags(run, exported, tmp_path):
    start = start_from(run[1], exported, **{"model.ffn_size": 128, "model.heads": 2})
    given = {"model.ffn_size", "model.heads"}
    with pytest.raises(ConversionError, match=r"--config\.model\.heads=4.*ffn_size=64"):
        recipes.read_start(start, Workdir(tmp_path), given)


def test_another_number_of_entries_is_refused(run, exported, tmp_path):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n")
    start = start_from(run[1], exported, **{"tokenizer.path": str(vocabulary)})
    with pytest.raises(ConversionError, match=r"has 6 entries, but the weights are of .* of \d+;"):
        recipes.read_start(start, Workdir(tmp_path))


def test_another_vocabulary_is_refused(run, exported):
    folder, config = run
    source = sources.read_source(str(exported))
    tokenizer, _ = read_tokenizer(Workdir(folder), config)
    importing.check_vocabulary(source, tokenizer)
    tokenizer._vocabulary.entries[10] += "x"
    with pytest.raises(ConversionError, match="differ from entry 10 on"):
        importing.check_vocabulary(source, tokenizer)


def test_masking_may_change_with_a_warning(make_run, exported, run, caplog):
    config = make_config(mask_convolution=True)
    start = start_from(config, exported)
    source = sources.read_source(str(exported))
    with caplog.at_level("WARNING"):
        sources.initialize(start, source)
    assert "near padding it computes something else" in caplog.text


def test_init_from_is_part_of_a_run(run):
    """A run that began from random weights does not become another by a flag."""
    folder, config = run
    other = dataclasses.replace(config, init_from="somewhere")
    with (
        pytest.raises(WorkdirError, match=r"config\.init_from was ''"),
        Workdir(folder).open(other),
    ):
        pass


def test_revisions_are_refused_before_training(make_run):
    config = make_config(generator={"size": 0.25})
    from convbert_jax.interop.networks import outline

    with pytest.raises(ConversionError, match="release_heads=false"):
        conversion.check_expressible(outline(config))
    conversion.check_expressible(outline(make_config()))


@pytest.mark.parametrize("form", ["huggingface", "tensorflow1"])
def test_masked_convolution_travels(make_run, tmp_path, form):
    folder, config = make_run(mask_convolution=True)
    out = conversion.export(folder, form=form)
    if form == "huggingface":
        assert json.loads((out / "config.json").read_text())["convbert_jax"]["mask_convolution"]
    imported, _ = importing.import_run(str(out), config, tmp_path / "back")
    assert imported.model.mask_convolution
