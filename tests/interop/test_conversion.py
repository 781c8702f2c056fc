"""Conversions between runs, Hugging Face folders and TensorFlow 1 checkpoints."""

import dataclasses
import resource
import shutil
import signal

import jax
import numpy as np
import pytest

from convbert_jax.config import UserError, from_config_dict, to_dict
from convbert_jax.data.errors import TokenizerError
from convbert_jax.interop import (
    conversion,
    huggingface,
    huggingface_tokenizer,
    importing,
    matching,
    sources,
    tensorflow1,
)
from convbert_jax.interop.networks import ConversionError, outline, split
from convbert_jax.interop.sources import read_tokenizer
from convbert_jax.recipes import start as recipes
from convbert_jax.training import checkpoints
from convbert_jax.workdir import Workdir, WorkdirError
from tests.interop.conftest import (
    MODERN,
    assert_same,
    make_config,
    random_params,
    write_entries,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("without_pytorch")
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def run(make_run):
    return make_run(mask_convolution=False)


@pytest.fixture(scope="module")
def exported(run):
    """The run as a Hugging Face folder and as a TensorFlow checkpoint."""
    return {form: conversion.export(run[0], form=form) for form in ("huggingface", "tensorflow1")}


def networks_of(folder):
    config = Workdir(folder).read_config()
    return split(config, sources.read_params(Workdir(folder), config)[1])


def plain(config, **fields):
    """Return the config of a user who does not know the sizes."""
    start = make_config(layers=3, recipe=config.recipe, mask_convolution=False)
    return matching.replace(start, fields)


def test_a_run_as_a_folder(run, exported):
    folder, out = run[0], exported["huggingface"]
    assert out == folder / "huggingface" / "step-3"
    source = huggingface.read_folder(out)
    for name, network in networks_of(folder).items():
        assert_same(network, source.networks[name])
    said = {"mask_convolution": False, "step": 3, "network": "discriminator", "generator": True}
    assert source.extra["main"] == said
    card = (out / "README.md").read_text()
    assert "discriminator_predictions" in card
    assert 'subfolder="generator"' in card
    for place in (out, out / "generator"):
        assert (place / "tokenizer.json").is_file()
        assert (place / "spiece.model").is_file()


@pytest.mark.parametrize("form", ["huggingface", "tensorflow1"])
def test_there_and_back(run, exported, tmp_path, form):
    """Run -> export -> run: all parameters are bit-identical; exported moments are zero."""
    folder, config = run
    imported, report = importing.import_run(str(exported[form]), plain(config), tmp_path / "back")
    assert not report.initialized
    assert not report.ignored
    assert imported.encoder == config.encoder
    assert imported.generator_encoder == config.generator_encoder
    assert imported.tokenizer.vocab_size == config.tokenizer.vocab_size
    for name, network in networks_of(tmp_path / "back").items():
        assert_same(networks_of(folder)[name], network)
    tokenizer, _ = read_tokenizer(Workdir(tmp_path / "back"), imported)
    assert tokenizer.entries == read_tokenizer(Workdir(folder), config)[0].entries
    if form == "tensorflow1":
        read = tensorflow1.read_checkpoint(exported[form] / "model.ckpt-3")
        assert not any(array.any() for array in read.moments[0]["main"].parameters.values())
        assert checkpoints.list_steps(tmp_path / "back" / "checkpoints") == [3]


@pytest.mark.parametrize(
    ("of", "form"),
    [("huggingface", "tensorflow1"), ("tensorflow1", "huggingface"), ("run", "huggingface")],
)
def test_any_format_becomes_any_other(run, exported, tmp_path, of, form):
    source = {"run": run[0], **exported}[of]
    out = conversion.convert(str(source), str(tmp_path / "b"), form=form)
    assert out == tmp_path / "b"
    read = sources.read_source(str(out))
    assert (read.kind, read.step) == (form, 3)
    for name, network in networks_of(run[0]).items():
        assert_same(network, read.networks[name])
    assert read.tokenizer["kind"] == "sentencepiece"


def test_step_and_moments_of_a_checkpoint_go_on(run, tmp_path):
    """Converts to a run, and to another checkpoint without the generator."""
    folder, config = run
    parts = networks_of(folder)
    moments = tuple(split(config, random_params(config, seed)) for seed in (1, 2))
    tensorflow1.write_checkpoint(tmp_path / "a" / "m", parts, step=70, moments=moments)
    source = str(tmp_path / "a")
    out = conversion.convert(source, tmp_path / "b", form="tensorflow1", with_generator=False)
    read = tensorflow1.read_checkpoint(out / "model.ckpt-70")
    assert read.networks.keys() == {"main"}
    assert_same(read.moments[1]["main"], moments[1]["main"])

    with refused(ConversionError, field="config.tokenizer.path"):
        importing.import_run(source, plain(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    path = str(read_tokenizer(Workdir(folder), config)[0].path)
    importing.import_run(source, plain(config, **{"tokenizer.path": path}), tmp_path / "run")
    _, arrays = checkpoints.load_arrays(tmp_path / "run" / "checkpoints", 70)
    name = "generator/stages/0/mixer/query/kernel"
    for kind, seed in (("mu", 1), ("nu", 2)):
        (found,) = (array for path, array in arrays.items() if path.endswith(f"/{kind}/{name}"))
        expected = random_params(config, seed)["generator"]["stages"]["0"]["mixer"]["query"]
        np.testing.assert_array_equal(found, expected["kernel"])
    counts = [array for name, array in arrays.items() if name.endswith("/count")]
    assert counts
    assert all(count == 70 for count in counts)


@pytest.mark.parametrize(
    "fields",
    [
        {"recipe": "masked_lm", "mixer": "attention", "embedding_size": 32},
        {"recipe": "masked_lm", "layers": 5, **MODERN},
        pytest.param({"mixer": "attention"}, marks=pytest.mark.slow),
        {"generator": {"kind": "shared"}},
        pytest.param({"generator": {"tie_embeddings": False}}, marks=pytest.mark.slow),
        pytest.param({"generator": {"kind": "uniform"}}, marks=pytest.mark.slow),
    ],
    ids=["bert", "modern", "electra", "shared", "untied", "uniform"],
)
def test_other_kinds_of_runs(make_run, tmp_path, fields):
    folder, config = make_run(**fields)
    start = matching.replace(config, {"model.layers": 3, "model.ffn_size": 128})
    _, report = importing.import_run(str(conversion.export(folder)), start, tmp_path / "back")
    assert not report.initialized
    assert not report.ignored
    for name, network in networks_of(tmp_path / "back").items():
        assert_same(networks_of(folder)[name], network)


def test_masked_convolution_is_kept(make_run, tmp_path):
    folder, config = make_run(mask_convolution=True)
    for form in ("huggingface", "tensorflow1"):
        out = conversion.export(folder, form=form)
        imported, _ = importing.import_run(str(out), config, tmp_path / form)
        assert imported.model.mask_convolution


# --- Errors of exports and imports ---


def test_folders_are_replaced_only_if_they_are_ours(run, tmp_path):
    folder, out = run[0], tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with refused(ConversionError, path=out):
        conversion.export(folder, output=out)
    assert (out / "thesis.txt").exists()
    shutil.rmtree(out)
    for _ in range(2):
        conversion.export(folder, output=out)
    assert not list(tmp_path.glob("*.unfinished"))
    for name, content in (("model.onnx", "made of it"), ("README.md", "a better card")):
        before = (out / name).read_text() if (out / name).exists() else None
        (out / name).write_text(content)
        with refused(ConversionError, path=out, value=name):
            conversion.export(folder, output=out)
        assert (out / name).read_text() == content
        (out / name).unlink() if before is None else (out / name).write_text(before)
    shutil.copytree(folder, tmp_path / "other")
    with refused(ConversionError, path=out):
        conversion.export(tmp_path / "other", output=out)
    with refused(ConversionError, path=folder / "config.json" / "out"):
        conversion.export(folder, output=folder / "config.json" / "out")


@pytest.mark.parametrize("form", ["huggingface", "tensorflow1", "stablehlo"])
def test_a_full_disk_keeps_the_old_export(run, tmp_path, form):
    """A file size limit simulates the full disk."""
    out = tmp_path / "out"
    conversion.export(run[0], form=form, output=out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert form != "stablehlo" or len(before[out / "encoder.mlir"]) > 1000
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, limits[1]))
    try:
        with refused(ConversionError, path=out):
            conversion.export(run[0], form=form, output=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(tmp_path.iterdir()) == [out]


def test_exports_that_cannot_be_are_refused(run, exported, make_run, tmp_path):
    folder, config = run
    with refused(ConversionError, path=tmp_path):
        sources.read_source(str(tmp_path))
    with refused(WorkdirError, tmp_path):
        conversion.export(tmp_path)
    with refused(WorkdirError, "4", "3"):
        conversion.export(folder, step=4)
    with refused(ConversionError, field="--workdir"):
        importing.import_run(str(exported["huggingface"]), plain(config), folder)
    for write in (conversion.export, lambda path, **how: conversion.convert(path, "out", **how)):
        with refused(ConversionError, "huggingface", field="form", value="openvino"):
            write(str(folder), form="openvino")
    out = {"output": tmp_path / "out", "with_generator": True}
    masked, _ = make_run(recipe="masked_lm")
    for source, form in ((folder, "stablehlo"), (masked, "huggingface")):
        with refused(ConversionError, field="--generator"):
            conversion.export(source, form=form, **out)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["a" * 5_000, "~nobody/at/all", "a\nb"])
def test_paths_that_cannot_be(path):
    with pytest.raises(UserError):
        sources.read_source(path)


def test_a_damaged_vocabulary_is_refused(run, exported, tmp_path):
    path = write_entries(tmp_path, [f"{e}\r" for e in [*SPECIAL, *map(str, range(55))]])
    start = plain(run[1], **{"tokenizer.path": str(path), "tokenizer.kind": "wordpiece"})
    with refused(TokenizerError, path):
        importing.import_run(str(exported["huggingface"]), start, tmp_path / "run")


def test_the_small_generator_is_left_out_unless_it_is_asked_for(make_run, tmp_path, caplog):
    folder, config = make_run(generator={"size": 0.25})
    with refused(ConversionError, "--generator=false", "release_heads"):
        conversion.export(folder, with_generator=True)
    assert not (folder / "huggingface").exists()
    with refused(ConversionError, "release_heads"):
        conversion.check_expressible(outline(config))
    conversion.check_expressible(outline(make_config()))
    caplog.clear()
    out = conversion.export(folder)
    assert "release_heads" in caplog.text
    assert not (out / "generator").exists()
    _, report = importing.import_run(str(out), plain(config), tmp_path / "back")
    assert report.initialized
    assert all(path.startswith("generator") for path in report.initialized)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_no_numbers(make_run, tmp_path, value):
    def change(params):
        params["generator_head"]["output_bias"][7] = value
        return params

    folder, config = make_run(change=change, mask_convolution=False)
    parts = split(config, change(random_params(config)))
    tensorflow1.write_checkpoint(tmp_path / "m", parts, step=70, moments=(parts, parts))
    for place, read in (
        (folder, conversion.export),
        (folder, lambda path: sources.read_source(str(path))),
        (tmp_path, lambda path: sources.read_source(str(path))),
    ):
        with refused(ConversionError, place, "output_bias"):
            read(place)


# --- Damaged exports ---


def test_a_generator_that_is_gone(exported, tmp_path, caplog):
    shutil.copytree(exported["huggingface"], tmp_path / "it")
    (tmp_path / "it" / "generator" / "config.json").unlink()
    with refused(ConversionError, "config.json", path=tmp_path / "it" / "generator"):
        sources.read_source(str(tmp_path / "it"))
    shutil.rmtree(tmp_path / "it" / "generator")
    caplog.clear()
    assert sources.read_source(str(tmp_path / "it")).networks.keys() == {"main"}
    assert [record.args[0] for record in caplog.records] == [str(tmp_path / "it")]


@pytest.mark.parametrize("name", ["model.safetensors", "generator/model.safetensors"])
def test_every_flipped_bit_of_an_export_is_noticed(exported, tmp_path, name):
    shutil.copytree(exported["huggingface"], tmp_path / "it")
    file = tmp_path / "it" / name
    data = file.read_bytes()
    rng = np.random.default_rng(0)
    for at in rng.integers(len(data), size=25):
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.integers(8)]) + data[at + 1 :])
        with refused(ConversionError, path=file):
            sources.read_source(str(tmp_path / "it"))


def test_changed_settings_are_logged_and_a_changed_vocabulary_is_refused(
    exported, tmp_path, caplog
):
    shutil.copytree(exported["huggingface"], tmp_path / "it")
    file = tmp_path / "it" / "config.json"
    file.write_text(file.read_text().replace('"layer_norm_eps": 1e-12', '"layer_norm_eps": 1e-02'))
    caplog.clear()
    sources.read_source(str(tmp_path / "it"))
    assert str(file) in caplog.text
    file = tmp_path / "it" / "spiece.model"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with refused(ConversionError, path=file):
        sources.read_source(str(tmp_path / "it"))


# --- config.init_from ---

OTHER_SIZES = {
    "model.layers": 1, "model.hidden_size": 48, "model.embedding_size": 24, "model.heads": 2,
    "model.ffn_size": 128, "model.kernel_size": 5, "generator.size": 0.5,
    "generator.kind": "uniform", "tokenizer.vocab_size": 5_000, "tokenizer.kind": "wordpiece",
    "tokenizer.path": "",
}  # fmt: skip


def start_from(config, source, **fields):
    if "tokenizer.path" not in fields:
        fields["tokenizer.path"] = str(huggingface_tokenizer.find_vocabulary(source))
    config = dataclasses.replace(config, init_from=str(source))
    return from_config_dict(to_dict(matching.replace(config, fields)))


@pytest.mark.parametrize("of", ["run", "huggingface", "tensorflow1"])
def test_sizes_and_vocabulary_are_those_of_the_weights(run, exported, tmp_path, caplog, of):
    folder, config = run
    start = start_from(config, {"run": folder, **exported}[of], **OTHER_SIZES)
    with caplog.at_level("INFO"):
        found, source = recipes.read_start(start, Workdir(tmp_path))
    assert found.model == dataclasses.replace(
        config.model, mask_convolution=found.model.mask_convolution
    )
    assert found.generator == config.generator
    assert found.tokenizer.vocab_size == config.tokenizer.vocab_size
    assert found.tokenizer.kind == config.tokenizer.kind
    assert "--config.model.heads=4" in caplog.text
    expected = sources.read_params(Workdir(folder), config)[1]
    jax.tree.map(np.testing.assert_array_equal, recipes.fill(found, source), expected)
    assert recipes.read_start(found, Workdir(tmp_path))[0] == found  # as in config.json
    # Once the run has its own checkpoints, the source is not read again.
    assert recipes.read_start(found, Workdir(folder))[1] is None


def test_a_resumed_run_keeps_the_sizes_it_took(run, exported, tmp_path):
    """The same command works after the source weights are deleted."""
    begun, second = tmp_path / "begun", tmp_path / "second"
    start = start_from(run[1], exported["huggingface"], **OTHER_SIZES)
    taken = recipes.read_start(start, Workdir(begun))[0]
    kept, again = (dataclasses.replace(c, init_from=str(tmp_path / "x")) for c in (taken, start))
    for folder, config in ((begun, taken), (second, kept)):
        with Workdir(folder).open(config):
            (folder / "checkpoints" / "3").mkdir(parents=True)
    assert recipes.read_start(again, Workdir(second)) == (kept, None)
    assert recipes.read_start(start, Workdir(begun)) == (taken, None)
    other = matching.replace(start, {"model.heads": 2})
    asked = recipes.read_start(other, Workdir(begun), {"model.heads"})[0]
    with refused(WorkdirError, "config.model.heads", "4", "2"), Workdir(begun).open(asked):
        pass


def test_weights_that_do_not_fit_are_refused(run, exported, tmp_path):
    folder, config = run
    source = exported["huggingface"]
    start = start_from(config, source, **{"model.ffn_size": 128, "model.heads": 2})
    with refused(ConversionError, "--config.model.heads=4", "ffn_size=64"):
        recipes.read_start(start, Workdir(tmp_path), {"model.ffn_size", "model.heads"})
    path = write_entries(tmp_path, [*SPECIAL, "a"])
    start = start_from(config, source, **{"tokenizer.path": str(path)})
    with refused(ConversionError, "6", field="config.tokenizer.path", value=str(path)):
        recipes.read_start(start, Workdir(tmp_path))
    tokenizer, _ = read_tokenizer(Workdir(folder), config)
    read = sources.read_source(str(source))
    importing.check_vocabulary(read, tokenizer)
    tokenizer.entries[10] += "x"
    with refused(ConversionError, "10", field="config.tokenizer.path", path=tokenizer.path):
        importing.check_vocabulary(read, tokenizer)
    other = dataclasses.replace(config, init_from="somewhere")  # the run has random weights
    with refused(WorkdirError, "config.init_from"), Workdir(folder).open(other):
        pass


def test_masking_may_change_with_a_warning(exported, caplog):
    start = start_from(make_config(mask_convolution=True), exported["huggingface"])
    source = sources.read_source(str(exported["huggingface"]))
    caplog.clear()
    sources.initialize(start, source)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "config.model.mask_convolution=True" in caplog.text
