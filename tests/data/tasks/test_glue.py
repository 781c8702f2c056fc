"""Every GLUE task from the real files where they are, from files with the official columns, and
from TFDS."""

import gzip
import logging

import pytest

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import glue
from convbert_jax.data.tasks.labelled_text import require_labels, swap_texts

_PARSES = "sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
_MNLI = f"index promptID pairID genre {_PARSES} sentence1 sentence2"
_STSB = "index genre filename year old_index source1 source2 sentence1 sentence2"
# task -> split -> (file, columns of the official file by name, label of each of two rows)
OFFICIAL = {
    "CoLA": {
        "train": ("CoLA/train.tsv", None, "1 0"),
        "validation": ("CoLA/dev.tsv", None, "0 1"),
        "test": ("CoLA/test.tsv", "index sentence", ""),
    },
    "SST-2": {
        "train": ("SST-2/train.tsv", "sentence label", "1 0"),
        "validation": ("SST-2/dev.tsv", "sentence label", "0 1"),
        "test": ("SST-2/test.tsv", "index sentence", ""),
    },
    "MRPC": {
        "train": ("MRPC/train.tsv", "Quality #1_ID #2_ID #1_String #2_String", "1 0"),
        "validation": ("MRPC/dev.tsv", "Quality #1_ID #2_ID #1_String #2_String", "0 1"),
        "test": ("MRPC/test.tsv", "index #1_ID #2_ID #1_String #2_String", ""),
    },
    "STS-B": {
        "train": ("STS-B/train.tsv", f"{_STSB} score", "3.800 0.0"),
        "validation": ("STS-B/dev.tsv", f"{_STSB} score", "5.000 2.25"),
        "test": ("STS-B/test.tsv", _STSB, ""),
    },
    "QQP": {
        "train": ("QQP/train.tsv", "id qid1 qid2 question1 question2 is_duplicate", "1 0"),
        "validation": ("QQP/dev.tsv", "id qid1 qid2 question1 question2 is_duplicate", "0 1"),
        "test": ("QQP/test.tsv", "id question1 question2", ""),
    },
    "MNLI": {
        "train": ("MNLI/train.tsv", f"{_MNLI} label1 gold_label", "neutral contradiction"),
        "validation_matched": (
            "MNLI/dev_matched.tsv",
            f"{_MNLI} label1 label2 label3 label4 label5 gold_label",
            "entailment neutral",
        ),
        "validation_mismatched": (
            "MNLI/dev_mismatched.tsv",
            f"{_MNLI} label1 label2 label3 label4 label5 gold_label",
            "contradiction entailment",
        ),
        "test_matched": ("MNLI/test_matched.tsv", _MNLI, ""),
        "test_mismatched": ("MNLI/test_mismatched.tsv", _MNLI, ""),
        "test_diagnostic": ("diagnostic/diagnostic.tsv", "index sentence1 sentence2", ""),
    },
    "QNLI": {
        "train": ("QNLI/train.tsv", "index question sentence label", "entailment not_entailment"),
        "validation": (
            "QNLI/dev.tsv",
            "index question sentence label",
            "not_entailment entailment",
        ),
        "test": ("QNLI/test.tsv", "index question sentence", ""),
    },
    "RTE": {
        "train": ("RTE/train.tsv", "index sentence1 sentence2 label", "not_entailment entailment"),
        "validation": ("RTE/dev.tsv", "index sentence1 sentence2 label", "entailment entailment"),
        "test": ("RTE/test.tsv", "index sentence1 sentence2", ""),
    },
    "WNLI": {
        "train": ("WNLI/train.tsv", "index sentence1 sentence2 label", "1 0"),
        "validation": ("WNLI/dev.tsv", "index sentence1 sentence2 label", "0 1"),
        "test": ("WNLI/test.tsv", "index sentence1 sentence2", ""),
    },
}
SPLITS = [(task, split) for task, splits in OFFICIAL.items() for split in splits]
_TEXTS = ("sentence", "question", "sentence1", "sentence2", "question1", "question2")
_INDICES = ("index", "id")


def _cell(column: str, row: int, label: str) -> str:
    if column in ("label", "Quality", "score", "is_duplicate", "gold_label"):
        return label
    if column in _INDICES:
        return str(row)
    if column in _TEXTS or column.endswith("String"):
        return f'Text {row} of "{column}.  '  # a quotation mark that nothing closes
    return f"other {column}"


def write_official(root, task, split, *, packed=False):
    """Two rows as in the official file; quirks too."""
    name, columns, labels = OFFICIAL[task][split]
    labels = labels.split() or ["", ""]
    if columns is None:  # CoLA has no header
        lines = [f'gj04\t{label}\t*\tText {row} of "sentence.' for row, label in enumerate(labels)]
    else:
        columns = [
            column.replace("_", " ") if "#" in column else column for column in columns.split()
        ]
        lines = ["\t".join(columns)]
        lines += [
            "\t".join(_cell(column, row, label) for column in columns)
            for row, label in enumerate(labels)
        ]
    data = ("\n".join(lines) + ("" if task == "CoLA" else "\n")).encode()
    if task == "MRPC" and split != "test":
        data = b"\xef\xbb\xbf" + data
    path = root / (name + (".gz" if packed else ""))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(data) if packed else data)
    return path


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    root = tmp_path_factory.mktemp("glue")
    for number, (task, split) in enumerate(SPLITS):
        write_official(root, task, split, packed=number % 2 == 1)
    return root


def test_the_table_is_complete():
    assert {task: list(table.splits) for task, table in glue.GLUE.items()} == {
        task: list(splits) for task, splits in OFFICIAL.items()
    }


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_official_columns(official, name, split):
    task = glue.open_task(name.lower(), str(official))
    examples = task.read(split)
    assert [example.id for example in examples] == ["0", "1"]
    assert all(len(example.texts) == task.texts for example in examples)
    for row, example in enumerate(examples):
        assert all(text.startswith(f'Text {row} of "') for text in example.texts)
        assert len(set(example.texts)) == task.texts  # not the same column twice
        assert all(text == text.strip() for text in example.texts)
    expected = OFFICIAL[name][split][2].split()
    found = [example.label for example in examples]
    if not expected:
        assert found == [None, None]
    elif task.kind == "regression":
        assert found == [float(label) for label in expected]
    else:
        assert [task.spellings[label] for label in found] == expected


def test_label_orders_of_the_release(official):
    def open_task(name):
        return glue.open_task(name, str(official))

    assert open_task("MNLI").labels == ("contradiction", "entailment", "neutral")
    assert open_task("RTE").labels == open_task("QNLI").labels == ("entailment", "not_entailment")
    for name in ("CoLA", "SST-2", "MRPC", "QQP", "WNLI"):
        assert open_task(name).spellings == ("0", "1")
    assert open_task("STS-B").labels == ()
    assert open_task("STS-B").scale == 5
    assert {name for name in glue.GLUE if open_task(name).swap_pairs} == {"MRPC", "STS-B"}
    assert open_task("MNLI").validation_splits == ("validation_matched", "validation_mismatched")


def test_counts_beside_the_official_ones(official, caplog):
    with caplog.at_level(logging.WARNING):
        glue.open_task("QQP", str(official)).read("train")
    assert "GLUE QQP has 2 rows in train, not the official 363,846" in caplog.text


def test_swapped_pairs(official):
    examples = glue.open_task("MRPC", str(official)).read("train")
    doubled = swap_texts(examples)
    assert len(doubled) == 4
    assert doubled[:2] == examples
    assert doubled[2].texts == examples[0].texts[::-1]
    assert doubled[2].label == examples[0].label
    assert len({example.id for example in doubled}) == 4


def test_what_is_missing_is_named(tmp_path):
    write_official(tmp_path, "QNLI", "validation")
    task = glue.open_task("QNLI", str(tmp_path))
    assert task.has("validation")
    assert not task.has("train", "validation")
    with pytest.raises(DataError, match=r"QNLI has no train split here: .* has no QNLI/train\.tsv"):
        task.read("train")
    with pytest.raises(DataError, match="QNLI has no split 'dev'; it has: train, validation, test"):
        task.read("dev")
    with pytest.raises(DataError, match=r"no diagnostic/diagnostic\.tsv"):
        glue.open_task("MNLI", str(tmp_path)).read("test_diagnostic")
    with pytest.raises(DataError, match="GLUE has no task 'COLAS'; choose one of: CoLA, SST-2"):
        glue.open_task("COLAS", str(tmp_path))
    for root in (str(tmp_path / "nowhere"), "", "tfds:/nowhere"):
        with pytest.raises(DataError) as refused:
            glue.open_task("MNLI", root)
        for part in ("--config.finetune.data=FOLDER", "https://", "MNLI/dev_matched.tsv"):
            assert part in str(refused.value)
    with pytest.raises(DataError, match=r"no prepared glue/cola; run tfds build glue/cola"):
        glue.open_task("CoLA", f"tfds:{tmp_path}").read("train")


def test_other_places_of_the_diagnostic_set(tmp_path):
    path = write_official(tmp_path, "MNLI", "test_diagnostic", packed=True)
    (tmp_path / "AX").mkdir()
    path.rename(tmp_path / "AX" / "AX.tsv.gz")
    assert len(glue.open_task("MNLI", str(tmp_path)).read("test_diagnostic")) == 2


def test_bad_rows(tmp_path, caplog):
    path = write_official(tmp_path, "QQP", "train")
    good = path.read_text()
    row = "7\t1\t2\tWhy?\tHow?\t1\n"
    path.write_text(good + row * 120 + "8\t1\t2\tHow?\n" + "9\t1\t2\t\tEmpty?\t0\n")
    with caplog.at_level(logging.WARNING):
        examples = glue.open_task("QQP", str(tmp_path)).read("train")
    assert len(examples) == 123
    assert "1 of 124 rows left out; the first: line 124 has 4 columns instead of 6" in caplog.text
    assert "has 1 rows with an empty text, the first with index 122; they are kept" in caplog.text

    path.write_text(good + "8\t1\t2\tHow?\n")
    with pytest.raises(DataError, match="has 1 unusable rows of 3; the first: line 4 has 4 col"):
        glue.open_task("QQP", str(tmp_path)).read("train")
    path.write_text(good.replace("is_duplicate", "same"))
    with pytest.raises(DataError, match=r"no column 'is_duplicate' \(it has: id, qid1, .*official"):
        glue.open_task("QQP", str(tmp_path)).read("train")
    path.write_text(good + row[:-2] + "2\n")
    with pytest.raises(DataError, match="line 4 has the label '2', which is not one of: 0, 1"):
        glue.open_task("QQP", str(tmp_path)).read("train")

    path = write_official(tmp_path, "QQP", "test")
    path.write_text(path.read_text() + "2\tonly\n")
    with pytest.raises(DataError, match="line 4 has 2 columns instead of 3"):
        glue.open_task("QQP", str(tmp_path)).read("test")
    examples = glue.open_task("SST-2", str(official_one(tmp_path, "SST-2", "test"))).read("test")
    with pytest.raises(
        DataError, match="test split of SST-2 has no labels, so it cannot be scored"
    ):
        require_labels(glue.open_task("SST-2", str(tmp_path)), "test", examples)


def official_one(root, task, split):
    write_official(root, task, split)
    return root


# --- TensorFlow Datasets ---


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Folder with cola, stsb and mnli as TFDS lays them out, in its order of labels, shuffled."""
    import numpy as np
    import tensorflow_datasets as tfds

    text, idx = tfds.features.Text(), np.int32
    nli = ["entailment", "neutral", "contradiction"]
    configurations = {
        "cola": (
            {"sentence": text},
            tfds.features.ClassLabel(names=["unacceptable", "acceptable"]),
        ),
        "stsb": ({"sentence1": text, "sentence2": text}, np.float32),
        "mnli": ({"premise": text, "hypothesis": text}, tfds.features.ClassLabel(names=nli)),
        "ax": ({"premise": text, "hypothesis": text}, tfds.features.ClassLabel(names=nli)),
    }
    splits = {
        "mnli": ("train", "validation_matched", "validation_mismatched", "test_matched"),
        "ax": ("test",),
    }

    class MiniGlue(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("2.0.0")
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in configurations]  # noqa: RUF012

        def _info(self):
            texts, label = configurations[self.builder_config.name]
            features = tfds.features.FeaturesDict({**texts, "label": label, "idx": idx})
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, download_manager):
            names = splits.get(self.builder_config.name, ("train", "validation", "test"))
            return {name: self._generate_examples(name) for name in names}

        def _generate_examples(self, split):
            texts, _ = configurations[self.builder_config.name]
            for i in range(20):
                label = -1 if split.startswith("test") else i % len(texts) + (i % 2)
                yield i, {**{t: f"{t} {i}" for t in texts}, "label": label, "idx": i}

    folder = tmp_path_factory.mktemp("tfds")
    for name in configurations:
        MiniGlue(
            data_dir=str(folder), config=name, file_format="array_record"
        ).download_and_prepare()
    return folder / "mini_glue"


def test_tfds(prepared):
    cola = glue.open_task("CoLA", f"tfds:{prepared}").read("train")
    assert [example.id for example in cola] == [str(i) for i in range(20)]  # its shuffle is undone
    assert cola[3].texts == ("sentence 3",)
    assert [e.label for e in cola[:4]] == [0, 1, 0, 1]
    assert {e.label for e in glue.open_task("CoLA", f"tfds:{prepared}").read("test")} == {None}
    stsb = glue.open_task("STS-B", f"tfds:{prepared}").read("validation")
    assert stsb[3].label == 2.0
    assert stsb[3].texts == ("sentence1 3", "sentence2 3")
    mnli = glue.open_task("MNLI", f"tfds:{prepared}")
    # TFDS: 0 entailment, 2 contradiction; the release: 1 and 0
    assert [example.label for example in mnli.read("validation_matched")[:4]] == [1, 0, 1, 0]
    assert {example.label for example in mnli.read("test_diagnostic")} == {None}
    with pytest.raises(DataError, match="no split 'test_mismatched'"):
        mnli.read("test_mismatched")


# --- The real files ---

REAL = {
    ("CoLA", "train"): ("Our friends won't buy this analysis, let alone the next", 0.704),
    ("CoLA", "validation"): ("The sailors rode the breeze clear of the rocks.", 0.691),
    ("CoLA", "test"): ("Bill whistled past the house.", None),
    ("SST-2", "train"): ("hide new secretions from the parental units", 0.558),
    ("SST-2", "validation"): ("it 's a charming and often affecting journey .", 0.509),
    ("SST-2", "test"): ("uneasy mishmash of styles and genres .", None),
    ("MRPC", "train"): ('Amrozi accused his brother, whom he called "the witness"', 0.674),
    ("MRPC", "validation"): ("He said the foodservice pie business", 0.684),
    ("MRPC", "test"): ("PCCW's chief operating officer, Mike Butcher", None),
    ("QNLI", "validation"): ("What came into force after the new constitution", 0.505),
    ("QNLI", "test"): ("What organization is devoted to Jihad", None),
}


@pytest.mark.parametrize(("name", "split"), REAL)
def test_real_files(real_data, name, split, caplog):
    task = glue.open_task(name, str(real_data / "glue"))
    with caplog.at_level(logging.WARNING):
        examples = task.read(split)
    assert not caplog.text  # the official count, nothing left out, no empty text
    start, share = REAL[name, split]
    assert examples[0].texts[0].startswith(start)
    labels = [example.label for example in examples]
    if share is None:
        assert set(labels) == {None}
        assert [example.id for example in examples] == [str(i) for i in range(len(examples))]
    else:
        assert sum(labels) / len(labels) == pytest.approx(share, abs=5e-4)


def test_real_folder_says_what_is_absent(real_data):
    absent = {
        name: task.absent["train"]
        for name in glue.GLUE
        if not (task := glue.open_task(name, str(real_data / "glue"))).has("train")
    }
    assert list(absent) == ["STS-B", "QQP", "MNLI", "QNLI", "RTE", "WNLI"]
