"""SQuAD from its own files and from TFDS, and what is said about files that are not right."""

import gzip
import json

import pytest

from convbert_jax.data.errors import DataError
from convbert_jax.data.tasks import squad
from convbert_jax.data.tasks.squad import Answer, Question

CONTEXT = "Lamu is a town. It has caf\u00e9s."
QUESTIONS = [
    Question("a", "What is Lamu?", CONTEXT, (Answer("a town", 8), Answer("town", 10))),
    Question("b", "Has it mines?", CONTEXT, impossible=True),
]


def as_json(questions):
    entries = [
        {
            "id": q.id,
            "question": q.text,
            "is_impossible": q.impossible,
            "answers": [{"text": a.text, "answer_start": a.start} for a in q.answers],
            "plausible_answers": [{"text": "town", "answer_start": 10}],
        }
        for q in questions
    ]
    paragraph = {"context": questions[0].context, "qas": entries}
    return {"version": "v2.0", "data": [{"title": "Lamu", "paragraphs": [paragraph]}]}


def write(path, questions):
    opener = gzip.open if path.suffix == ".gz" else open
    path.parent.mkdir(exist_ok=True)
    with opener(path, "wt", encoding="utf-8") as file:
        json.dump(as_json(questions), file)
    return path


@pytest.mark.parametrize("name", ["dev-v2.0.json", "v2.0/dev-v2.0.json.gz"])
def test_original_file(tmp_path, name, caplog):
    write(tmp_path / name, QUESTIONS)
    assert squad.read("v2", "validation", tmp_path) == QUESTIONS
    assert squad.read("v2", "validation", tmp_path / name) == QUESTIONS
    assert "has 2 questions; the official dev of SQuAD v2.0 has 11873" in caplog.text


def test_another_name_is_taken_with_a_warning(tmp_path, caplog):
    write(tmp_path / "train-v1.1-part.json", QUESTIONS[:1])
    assert squad.read("v1", "train", tmp_path) == QUESTIONS[:1]
    assert "train-v1.1.json is not there; reading" in caplog.text
    assert "train-v1.1-part.json" in caplog.text


def test_tfds_directory(tmp_path):
    tfds = pytest.importorskip("tensorflow_datasets")
    import numpy as np

    class SmallSquad(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            text = tfds.features.Text
            answers = {"text": text(), "answer_start": np.int32}
            features = {
                "id": text(),
                "title": text(),
                "context": text(),
                "question": text(),
                "answers": tfds.features.Sequence(answers),
                "is_impossible": np.bool_,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, manager):
            return {"validation": self._generate_examples()}

        def _generate_examples(self):
            for q in QUESTIONS:
                answers = [{"text": a.text, "answer_start": a.start} for a in q.answers]
                yield (
                    q.id,
                    {
                        "id": q.id,
                        "title": "Lamu",
                        "context": q.context,
                        "question": q.text,
                        "answers": answers,
                        "is_impossible": q.impossible,
                    },
                )

    builder = SmallSquad(data_dir=str(tmp_path), file_format="array_record")
    builder.download_and_prepare()
    spec = f"tfds:{builder.data_dir}"
    assert sorted(squad.read("v2", "validation", spec), key=lambda q: q.id) == QUESTIONS
    with pytest.raises(DataError, match="has no split 'train'"):
        squad.read("v2", "train", spec)
    with pytest.raises(DataError, match=r"no dataset_info\.json"):
        squad.read("v2", "train", f"tfds:{tmp_path}")


def test_misplaced_answers_are_counted(caplog):
    right, wrong = QUESTIONS[0], Question("c", "?", CONTEXT, (Answer("mines", 3),))
    other = Question("d", "?", CONTEXT, (Answer("town", 8),))
    assert squad.misplaced([right, wrong, other]) == [wrong, other]
    assert squad.usable_for_training([right, wrong, other]) == [right]
    assert "2 of 3 answers are not in their context" in caplog.text
    assert "the first is question c: 'mines' at 3" in caplog.text
    with pytest.raises(DataError, match="No question has its answer"):
        squad.usable_for_training([wrong])
    with pytest.raises(DataError, match="Question e has no answer to train on"):
        squad.usable_for_training([right, Question("e", "?", CONTEXT)])


def test_without_data_the_flag_the_download_and_the_files_are_named(tmp_path):
    for folder in ("", str(tmp_path / "nowhere")):
        with pytest.raises(DataError) as refused:
            squad.check_present("v2", folder)
        for part in (
            "--config.finetune.data=FOLDER",
            "train-v2.0.json",
            "dev-v2.0.json",
            "https://",
        ):
            assert part in str(refused.value)
    with pytest.raises(DataError, match=r"has no train-v2\.0\.json"):
        squad.check_present("v2", str(tmp_path))
    write(tmp_path / "train-v2.0.json", QUESTIONS)
    with pytest.raises(DataError, match=r"json is one file, and training and scoring need two"):
        squad.check_present("v2", str(tmp_path / "train-v2.0.json"))


def test_bad_files(tmp_path):
    with pytest.raises(DataError, match=r"has no train-v1\.1\.json"):
        squad.read("v1", "train", tmp_path)
    with pytest.raises(DataError, match="no public split 'test'"):
        squad.read("v1", "test", tmp_path)
    path = tmp_path / "dev-v1.1.json"
    path.write_text('{"data": [{"paragraphs": ')
    with pytest.raises(DataError, match="cannot be read as JSON"):
        squad.read("v1", "validation", tmp_path)
    path.write_text('{"data": [{"paragraphs": [{"qas": []}]}]}')
    with pytest.raises(DataError, match=r"not in SQuAD's format.*KeyError: 'context'"):
        squad.read("v1", "validation", tmp_path)
    path.write_text('{"data": []}')
    with pytest.raises(DataError, match="has no question"):
        squad.read("v1", "validation", tmp_path)
    write(path, QUESTIONS)
    with pytest.raises(DataError, match="1 impossible questions, so it is SQuAD 2"):
        squad.read("v1", "validation", tmp_path)
    write(path, QUESTIONS[:1] * 2)
    with pytest.raises(DataError, match="question id a twice"):
        squad.read("v1", "validation", tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("question", value) for value in (5, None, ["a"])],
        *[("context", value) for value in (5, None, {})],
        *[("answers", value) for value in (5, "x", [5], [{"text": 5, "answer_start": 0}])],
        ("answers", [{"text": "x", "answer_start": 1e999}]),
        ("answers", [{"text": "\ud800", "answer_start": 0}]),
        *[("id", value) for value in (None, [1])],
        ("is_impossible", "false"),
    ],
)
def test_fields_of_another_type(tmp_path, field, value):
    entry = {"id": "a", "question": "?", "answers": [{"text": "one", "answer_start": 0}]}
    paragraph = {"context": CONTEXT, "qas": [entry]}
    (paragraph if field == "context" else entry)[field] = value
    path = tmp_path / "dev-v1.1.json"
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    with pytest.raises(DataError, match=r"not in SQuAD's format|cannot be read as JSON"):
        squad.read("v1", "validation", tmp_path)


@pytest.mark.parametrize("content", [b"[" * 99_999, b"\xff", b"", b"5", b'{"data": 5}'])
@pytest.mark.parametrize("name", ["dev-v1.1.json", "dev-v1.1.json.gz"])
def test_files_of_another_kind(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError):
        squad.read("v1", "validation", tmp_path)


def test_real_files(real_data, caplog):
    folder = real_data / "squad"
    dev = squad.read("v1", "validation", folder)
    assert len(dev) == 10_570
    assert not caplog.records
    assert squad.misplaced(dev) == []
    assert len({q.context for q in dev}) == 2_067
    second = squad.read("v2", "validation", folder)
    assert len(second) == 6_078
    assert "has 6078 questions; the official dev of SQuAD v2.0 has 11873" in caplog.text
    assert squad.misplaced(second) == []
    assert all(bool(q.answers) != q.impossible for q in second)
    train = squad.read("v1", "train", folder)
    assert len(train) == 87_599  # the larger of two files that could be meant
    assert squad.usable_for_training(train) == train
