"""The recipe embedding: rows, training, resuming, vectors, devices."""

import shutil

import jax
import numpy as np
import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import ConfigError, MeshSection
from convbert_jax.interfaces import TEXTS_OF_PAIR
from convbert_jax.interop import sources
from convbert_jax.interop.matching import replace
from convbert_jax.recipes import start, tasks
from convbert_jax.training import partitioning
from convbert_jax.training.checkpoints import load_arrays
from convbert_jax.training.partitioning import flatten_params
from convbert_jax.training.train_step import make_program
from convbert_jax.workdir import Workdir
from tests.data.parallel.conftest import make_pairs, write_files
from tests.end_to_end.test_devices import SPECIAL
from tests.refusals import refused
from tests.runs import make_config, one_device

FIELDS = {
    "recipe": "embedding",
    "parallel__heldout_fraction": 0.1,
    "parallel__batch_tokens": 256,
    "parallel__shapes": 1,
    "parallel__max_length": 32,
    "optimizer__warmup_steps": 1,
    "train__steps": 4,
    "train__log_every": 2,
    "train__eval_every": 4,
    "train__eval_rows": 24,
    "checkpoint__every": 2,
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    return write_files(tmp_path_factory.mktemp("pairs"), make_pairs(300))


@pytest.fixture(scope="module")
def run(pairs, tmp_path_factory):
    """Config and result of a run of four steps."""
    config = make_config(**FIELDS, parallel__source=pairs)
    with one_device():
        return config, recipes.pretrain(config, tmp_path_factory.mktemp("embedding") / "run")


def test_a_run_resumes_exactly(run, tmp_path):
    config, whole = run
    folder = shutil.copytree(whole.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints" / "4")  # as if killed before saving it
    with one_device():
        again = recipes.pretrain(config, folder)
    assert again.evaluation == whole.evaluation
    assert whole.evaluation.keys() == set(config.heldout_metrics)
    (_, first), (_, second) = (load_arrays(Workdir(r.folder).checkpoints) for r in (whole, again))
    assert compare(first, second) == []


def test_a_run_starts_from_the_weights_and_vocabulary_of_an_encoder(pretrained, pairs, tmp_path):
    folder = str(pretrained.folder)
    config = make_config(**FIELDS, parallel__source=pairs, init_from=folder)
    config, source = start.read_start(config, Workdir(tmp_path / "run"))
    assert config.tokenizer.path
    found = flatten_params(start.fill(config, source))
    _, params = sources.read_params(Workdir(folder), Workdir(folder).read_config())
    learned = flatten_params(params)
    for path, leaf in found.items():
        np.testing.assert_array_equal(leaf, learned[path.replace("encoder/", "discriminator/", 1)])


def test_a_trained_run_gives_vectors_and_reads_its_rows_as_encode_does(run):
    config, result = run
    model = convbert_jax.load(str(result.folder))
    assert model.length == config.parallel.max_length
    data = tasks.open_data(model.config, Workdir(result.folder))
    mesh = partitioning.make_mesh(MeshSection(), jax.devices()[:1])
    batch = next(data.heldout(mesh)()[""])
    for tokens, mask in (("source", "source_ids"), ("tokens", "segment_ids")):
        ids = batch[tokens][0][batch[mask][0] > 0]
        text = model.tokenizer.decode(ids)
        assert model.tokenizer.pieces(ids) == model.tokenize(text)
        assert (batch[tokens][batch[mask] == 0] == model.tokenizer.special.pad).all()
    assert np.isfinite(model.encode(["a text", "another"])).all()


def test_every_text_may_be_paired_with_itself(tmp_path):
    """SimCSE."""
    file = tmp_path / "texts.csv"
    file.write_text("text\n" + "".join(f"{text}\n" for text, _ in make_pairs(300)))
    source = {"parallel__source": f"csv:{file}", "parallel__columns": ("text", "text")}
    config = make_config(**FIELDS, **source)
    recipes.prepare(config, tmp_path / "run")
    data = tasks.open_data(config, Workdir(tmp_path / "run"))
    batches = data.training(partitioning.make_mesh(MeshSection(), jax.devices()[:1]))
    batch = next(batches)
    batches.close()
    np.testing.assert_array_equal(batch["source"], batch["tokens"])
    with refused(ConfigError, field="config.parallel.columns"):
        generative = {"recipe": "translation", "model__position_embedding": "sinusoidal"}
        make_config(**FIELDS | generative | source)


TRIPLETS = {"parallel__columns": ("a", "b", "c"), "objective__matryoshka": (8,)}
SCORED = {"parallel__columns": ("a", "b"), "parallel__score_column": "d"}


@pytest.mark.parametrize("fields", [TRIPLETS, SCORED], ids=["triplets", "scores"])
def test_eight_devices_and_parts_of_a_batch_give_the_loss_and_gradients_of_one(fields):
    whole = make_config(
        **FIELDS | fields, model__mixer="mixed", tokenizer__vocab_size=150,
        model__dropout=0.0, model__attention_dropout=0.0,
    )  # fmt: skip
    parts = replace(whole, {"train.accumulation": 2})
    tokens = np.random.default_rng(0).integers(5, 64, (16, 24)).astype(np.int32)
    tokens[3] = tokens[12]  # equal texts on two devices
    mask = np.ones_like(tokens)
    mask[:8, 16:] = 0
    batch = {"source": tokens, "source_ids": mask, "tokens": tokens[:, ::-1], "segment_ids": mask}
    if fields is TRIPLETS:
        batch |= {"negatives": np.roll(tokens, 1, axis=1), "negative_ids": mask}
    else:
        batch["score"] = np.arange(16, dtype=np.float32) % 5

    def measure(config, sizes: MeshSection, devices: int):
        task = recipes.build_task(config, SPECIAL, jax.devices()[0])
        mesh = partitioning.make_mesh(sizes, jax.devices()[:devices])
        program = make_program(task, config, mesh)
        with jax.set_mesh(mesh):
            params = program.init(jax.random.key(1)).params
            both = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
            return jax.device_get(both(params, program.put_batch(batch), jax.random.key(2)))

    (one, _), expected = measure(whole, MeshSection(data=1), 1)
    (many, _), found = measure(parts, MeshSection(data=4, fsdp=2), 8)
    assert one > 1
    np.testing.assert_allclose(many, one, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_parts_of_a_batch_need_less_memory():
    """Gradient caching: activations of a single part."""

    def peak(accumulation: int) -> int:
        config = make_config(**FIELDS, tokenizer__vocab_size=150, model__layers=4)
        config = replace(config, {"train.accumulation": accumulation})
        task = recipes.build_task(config, SPECIAL, jax.devices()[0])
        mesh = partitioning.make_mesh(MeshSection(), jax.devices()[:1])
        params = make_program(task, config, mesh).abstract.params
        rows = jax.ShapeDtypeStruct((512, 32), np.int32)
        batch = dict.fromkeys(("source", "source_ids", "tokens", "segment_ids"), rows)
        with jax.set_mesh(mesh):
            gradient = jax.jit(jax.grad(lambda *given: task.loss(*given)[0]))
            compiled = gradient.lower(params, batch, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(16) < peak(1) / 4


def read_batch(folder, rows: str, **fields):
    """Returns the first batch of the rows of a csv file, and the texts of a field of it."""
    file = folder / "rows.csv"
    file.write_text(rows)
    config = make_config(
        **FIELDS | fields, parallel__source=f"csv:{file}", tokenizer__vocab_size=150
    )
    recipes.prepare(config, folder / "run")
    data = tasks.open_data(config, Workdir(folder / "run"))
    batches = data.training(partitioning.make_mesh(MeshSection(), jax.devices()[:1]))
    batch = next(batches)
    batches.close()

    def texts(name: str, mask: str) -> list[str]:
        tokens = zip(batch[name], batch[mask], strict=True)
        return [data.tokenizers[0].decode(ids[real > 0][1:-1]) for ids, real in tokens]

    return batch, texts


def test_rows_have_hard_negatives_and_prompts(tmp_path):
    rows = "".join(f"{a},{b},{b} {b}\n" for a, b in make_pairs(300))
    columns = {"parallel__columns": ("a", "b", "c"), "parallel__prompts": ("bo", "da")}
    _, texts = read_batch(tmp_path, f"a,b,c\n{rows}", **columns)
    first, second, third = (texts(*fields) for fields in TEXTS_OF_PAIR)
    assert all(text.startswith("bo ") for text in first)
    assert all(text.startswith("da ") for text in second)
    assert third == [f"{text} {text.removeprefix('da ')}" for text in second]


def test_rows_have_scores_and_long_texts_are_truncated(tmp_path):
    rows = "".join(f"{'bo ' * 40},{b},{i / 4}\n" for i, (_, b) in enumerate(make_pairs(300)))
    fields = {"parallel__columns": ("a", "b"), "parallel__score_column": "s"}
    fields |= {"parallel__cut_sources": True}
    batch, _ = read_batch(tmp_path, f"a,b,s\nx,y,none\n{rows}", **fields)
    assert batch["source"].shape[1] == FIELDS["parallel__max_length"]
    assert (batch["source_ids"] == 1).all()
    assert len({*batch["score"].tolist()}) == len(batch["score"])
    assert (batch["score"] * 4 % 1 == 0).all()


WRONG = [
    ({"parallel__max_length": 64}, ["config.model.positions", 32]),
    ({"parallel__columns": ("a", "b", "c", "d")}, []),
    ({"parallel__columns": ("a", "b", "c"), "parallel__score_column": "d"}, []),
    ({"parallel__score_column": "d", "parallel__source": "parallel:a,b"}, ["csv:FILE"]),
    ({"parallel__prompts": ("a",)}, []),
    ({"objective__matryoshka": (4, 64)}, ["config.model.hidden_size"]),
    ({"parallel__from_scratch": True, "init_from": "x"}, []),
    ({"sequence__shared_vocabulary": False}, []),
    ({"optimizer__release_replicas": 2}, []),
    ({"distillation__teacher": "x"}, []),
]


@pytest.mark.parametrize(("fields", "mentions"), WRONG)
def test_configs_that_cannot_run_are_refused(fields, mentions):
    first = next(iter(fields)).replace("__", ".")
    with refused(ConfigError, *mentions, field=f"config.{first}"):
        make_config(**FIELDS | fields)
