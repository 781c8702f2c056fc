"""One run per workdir, always with its model and corpus."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convbert_jax import config_files, storage
from convbert_jax.command_line.fields import field_types
from convbert_jax.config import Config, decided_by_run, to_dict
from convbert_jax.config.changes import is_changeable
from convbert_jax.storage import DamagedFileError
from convbert_jax.workdir import Workdir, WorkdirError
from tests.refusals import refused

CONFIG = Config()


def replace(section: str, **changes) -> Config:
    return dataclasses.replace(
        CONFIG, **{section: dataclasses.replace(getattr(CONFIG, section), **changes)}
    )


def keep(folder, config=CONFIG, *, checkpoint=True):
    """Writes the files of a run: its config, and a checkpoint if `steps` is positive."""
    with Workdir(folder).open(config):
        if checkpoint:
            (folder / "checkpoints" / "3").mkdir(parents=True)


def test_config_is_kept(tmp_path):
    with Workdir(tmp_path / "new" / "run").open(CONFIG):
        pass
    kept = json.loads((tmp_path / "new" / "run" / "config.json").read_text())
    assert kept == storage.seal(decided_by_run(to_dict(CONFIG)))


@pytest.mark.parametrize("opens", [False, True])
@settings(max_examples=60)
@given(bit=st.integers(min_value=0))
def test_a_flipped_bit_of_a_config_never_passes_unseen(bit, opens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    keep(folder)
    file = folder / "config.json"
    content = bytearray(file.read_bytes())
    place = bit % (8 * len(content))
    content[place // 8] ^= 1 << place % 8
    file.write_bytes(content)
    found = message = None
    try:
        if opens:
            keep(folder, checkpoint=False)
        found = Workdir(folder).read_config()
    except DamagedFileError as error:
        message = str(error)
    if message:
        assert str(file) in message
        assert file.read_bytes() == content
    else:
        assert found == CONFIG  # whitespace or number spelling differs


@pytest.mark.parametrize("line", ['"seed": 0', '"steps": 1000000'])
def test_a_config_changed_by_hand_is_refused_until_its_checksum_is_removed(line, tmp_path):
    keep(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(f" {line}", f" {line[:-1]}5", 1))
    with refused(DamagedFileError, "crc32", "--config.train.steps=", path=file):
        Workdir(tmp_path).read_config()
    with refused(DamagedFileError, "crc32", "--config.train.steps=", path=file):
        config_files.read_json(file)
    values = json.loads(file.read_text())
    del values["crc32"]
    file.write_text(json.dumps(values))
    assert Workdir(tmp_path).read_config() != CONFIG


OTHERS = [
    ("model", {"hidden_size": 512}),
    ("generator", {"size": 0.5}),
    ("objective", {"mask_fraction": 0.3}),
    ("tokenizer", {"vocab_size": 1000}),
    ("data", {"source": "text:x"}),
    ("data", {"length": 64}),
    ("train", {"batch_size": 64}),
]


@pytest.mark.parametrize(("section", "changes"), OTHERS)
def test_another_model_or_corpus_is_refused(tmp_path, section, changes):
    keep(tmp_path)
    kept = (tmp_path / "config.json").read_text()
    field = next(iter(changes))
    with (
        refused(WorkdirError, "--workdir", field=f"config.{section}.{field}", path=tmp_path),
        Workdir(tmp_path).open(replace(section, **changes)),
    ):
        pass
    assert (tmp_path / "config.json").read_text() == kept


@pytest.mark.parametrize(("section", "changes"), OTHERS)
def test_a_start_that_made_nothing_binds_nothing(tmp_path, section, changes):
    """A corrected command works after a failed one."""
    keep(tmp_path, checkpoint=False)
    (tmp_path / "checkpoints").mkdir()  # created, but without checkpoints
    (tmp_path / "results.jsonl").touch()
    changed = replace(section, **changes)
    keep(tmp_path, changed, checkpoint=False)
    assert Workdir(tmp_path).read_config() == changed


def test_a_field_younger_than_the_run_had_its_default(tmp_path):
    """Eight replicas instead of one change the gradient's scale relative to Adam's moments."""
    keep(tmp_path)
    kept = to_dict(CONFIG)
    del kept["optimizer"]["release_replicas"]
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with Workdir(tmp_path).open(CONFIG):
        pass
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with (
        refused(WorkdirError, 1, 8, field="config.optimizer.release_replicas"),
        Workdir(tmp_path).open(replace("optimizer", release_replicas=8)),
    ):
        pass


def test_a_config_of_older_rules_is_no_damage(tmp_path):
    old = replace("model", mixer="attention", head_ratio=4)
    with Workdir(tmp_path).open(old):
        pass
    with refused(DamagedFileError, "config.model.head_ratio", path=tmp_path / "config.json"):
        Workdir(tmp_path).read_config()
    with Workdir(tmp_path).open(CONFIG):
        pass
    assert Workdir(tmp_path).read_config() == CONFIG


@pytest.mark.parametrize("made", ["results.jsonl", "unfinished/checkpoints/5/params"])
def test_what_fine_tuning_made_binds_too(tmp_path, made):
    keep(tmp_path, checkpoint=False)
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).write_text("{}\n")
    with refused(WorkdirError, 64, field="config.train.batch_size"):
        keep(tmp_path, replace("train", batch_size=64))


def test_the_way_out_keeps_the_shards(tmp_path):
    keep(tmp_path)
    with pytest.raises(WorkdirError) as caught:
        keep(tmp_path, replace("train", batch_size=64))
    assert "config.data.directory" not in str(caught.value)  # no shards exist
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metadata.json").write_text("{}")
    with refused(WorkdirError, f"--config.data.directory={tmp_path}/data"):
        keep(tmp_path, replace("train", batch_size=64))
    with pytest.raises(WorkdirError) as caught:  # shards of another length cannot be used
        keep(tmp_path, replace("data", length=64))
    assert "config.data.directory" not in str(caught.value)


def damages():
    """Returns name -> damaged content of config.json."""
    values = decided_by_run(to_dict(CONFIG))
    whole = json.dumps(values)
    found = {
        "empty": b"",
        "cut": whole[:400].encode(),
        "not UTF-8": whole.replace("docstrings", "\u00e9").encode("latin-1"),
        "NUL": bytes(2000),
        "list": b"[]",
        "number": b"3",
        "null": b"null",
        "nested": b"[" * 100_000 + b"]" * 100_000,
        "nested sections": b'{"model":' * 50_000 + b"1" + b"}" * 50_000,
        "a long integer": b'{"seed": ' + b"9" * 5_000 + b"}",
        "a newer field": json.dumps(values | {"model": values["model"] | {"taps": 3}}).encode(),
        "a newer section": json.dumps(values | {"memory": {"size": 3}}).encode(),
        "of Hugging Face": b'{"architectures": ["ConvBertModel"], "hidden_size": 256}',
    }
    wrong = {str: 7, int: "7", float: "x", bool: "yes", list: 3, dict: [1]}
    for name, value in values.items():
        found[f"{name} of another type"] = json.dumps(values | {name: wrong[type(value)]}).encode()
        for field, inner in value.items() if isinstance(value, dict) else ():
            for other in (wrong[type(inner)], None, {"a": 1}):
                section = value | {field: other}
                found[f"{name}.{field} {other}"] = json.dumps(values | {name: section}).encode()
    return found


@pytest.mark.parametrize("bound", [False, True])
def test_a_damaged_config_is_one_sentence(tmp_path, bound):
    keep(tmp_path, checkpoint=bound)
    for name, content in damages().items():
        (tmp_path / "config.json").write_bytes(content)
        with refused(DamagedFileError, path=tmp_path / "config.json") as read:
            Workdir(tmp_path).read_config()
        with refused(DamagedFileError, path=tmp_path / "config.json") as opened:
            keep(tmp_path)
        for error in (read, opened):
            assert len(str(error.value)) < 500, name
            assert "\n" not in str(error.value), name
        assert (tmp_path / "config.json").read_bytes() == content  # nothing is overwritten


def test_no_config_is_no_run(tmp_path):
    with refused(WorkdirError, field="--workdir", value=str(tmp_path)):
        Workdir(tmp_path).read_config()
    with refused(WorkdirError, field="--workdir", value=f"{tmp_path}/nowhere"):
        Workdir(tmp_path / "nowhere").read_config()


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("train", {"steps": 5}),
        ("optimizer", {"learning_rate": 1.0}),
        ("model", {"remat": "full"}),
        ("data", {"workers": 3}),
        ("mesh", {"fsdp": 2}),
    ],
)
def test_speed_and_length_may_change(tmp_path, section, changes):
    keep(tmp_path)
    changed = replace(section, **changes)
    with Workdir(tmp_path).open(changed):
        pass
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept == storage.seal(decided_by_run(to_dict(changed)))


def test_second_run_is_refused_and_names_the_first(tmp_path):
    with Workdir(tmp_path).open(CONFIG):
        code = (
            "import pathlib, sys\n"
            "from convbert_jax.config import Config\n"
            "from convbert_jax.workdir import Workdir\n"
            "with Workdir(pathlib.Path(sys.argv[1])).open(Config()): pass\n"
        )
        result = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert f"in use by process {os.getpid()}" in result.stderr
    with Workdir(tmp_path).open(CONFIG):
        pass


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        refused(WorkdirError, field="--workdir", value=f"{tmp_path}/file/run"),
        Workdir(tmp_path / "file" / "run").open(CONFIG),
    ):
        pass


def test_a_vocabulary_that_is_its_own_copy_is_kept(tmp_path):
    """For example, a resumed run that uses its copy, or one that restarts without checkpoints."""
    (tmp_path / "vocab.txt").write_text("[PAD]")
    workdir = Workdir(tmp_path / "run")
    for source in (tmp_path / "vocab.txt", workdir.vocabulary / "vocab.txt"):
        workdir.keep_vocabularies({"": source}, {"": "of it"})
        assert (workdir.vocabulary / "vocab.txt").read_text() == "[PAD]"
        assert workdir.read_fingerprints() == {"": "of it"}


# Written out on purpose: detects fields that become or stop being bound.
MAY_CHANGE = {
    "": ("platform", "compute_dtype"),
    "model": ("attention", "convolution", "remat", "scan_unroll"),
    "generator": ("scan_unroll",),
    "data": ("workers", "prefetch", "directory", "cache"),
    "train": (
        *("steps", "accumulation", "log_every", "eval_every", "eval_rows", "warn_health"),
        *("gradient_dtype", "spike", "rollbacks", "hang_seconds", "silence_seconds"),
        "tracker",
        *("profile_start", "profile_steps", "compile_cache"),
    ),
    "checkpoint": ("every", "keep", "keep_every", "best_metric", "best_mode", "huggingface_every"),
    "mesh": ("data", "fsdp", "tensor", "sequence"),
    "distillation": ("teacher",),  # only a location: its checksum is bound
    "decoding": tuple(field.name for field in dataclasses.fields(CONFIG.decoding)),  # all fields
    "finetune": (
        *("tasks", "data", "show_best", "seeds", "vectorize_seeds", "eval_batch_size"),
        *("save_models", "checkpoint_minutes"),
    ),
}


@pytest.mark.parametrize("recipe", ["replaced_token", "masked_lm", "finetune"])
def test_exactly_these_fields_may_change(recipe):
    expected = {f"{section}.{name}".strip(".") for section, n in MAY_CHANGE.items() for name in n}
    if recipe != "finetune":
        names = (field.name for field in dataclasses.fields(CONFIG.optimizer))
        # only locations: their content is bound
        expected |= {"tokenizer.path", "parallel.target_vocabulary"}
        # scales the gradient but not Adam's moments; methods have different moments
        bound = ("release_replicas", "method")
        expected |= {f"optimizer.{name}" for name in names if name not in bound}
    found = {path for path in field_types() if is_changeable(Config, path, recipe)}
    assert found == expected
