"""Configs: shipped files load, invalid values are errors, and official hyperparameters match."""

import ast
import collections
import dataclasses
import importlib
import pathlib
import re

import hypothesis
import pytest
from hypothesis import strategies

from convbert_jax import config as config_lib
from convbert_jax import config_files
from convbert_jax.command_line import overrides
from convbert_jax.config import (
    Config,
    ConfigError,
    from_config_dict,
    mixers,
    to_config_dict,
    to_dict,
)
from convbert_jax.config.recipes import RECIPES
from convbert_jax.interop.huggingface import check_expressible
from convbert_jax.interop.networks import outline
from tests.refusals import refused

SIZES = ("tiny", "small", "medium_small", "base")


def load(name: str, variant: str = "default") -> Config:
    return from_config_dict(importlib.import_module(f"configs.{name}").get_config(variant))


@pytest.mark.parametrize("variant", ["default", "paper", "bert"])
@pytest.mark.parametrize("name", SIZES)
def test_shipped_configs_read_and_survive_json(name, variant):
    config = load(name, variant)
    assert config.name == (name if variant == "default" else f"{name}-{variant}")
    assert from_config_dict(to_dict(config)) == config


def test_paper_differs_from_default_in_every_quirk():
    """Each field marked as official in a comment must differ, or be equal on purpose."""
    assert changed_by("small", "paper") == RELEASE
    assert changed_by("base", "paper") == RELEASE | {"optimizer.release_replicas"}


def test_bert_is_its_recipe():
    assert changed_by("base", "bert") == {
        "recipe", "compute_dtype", "model.mixer", "objective.mask_token_fraction",
        "objective.random_token_fraction", "optimizer.learning_rate", "optimizer.bias_correction",
        "optimizer.decay_during_warmup", "data.layout", "tokenizer.kind",
        "tokenizer.lowercase", "tokenizer.strip_accents",
    }  # fmt: skip
    config = load("base", "bert")
    assert (config.recipe, config.train.batch_size) == ("masked_lm", 256)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (1e-4, 10_000)
    chosen = config.objective.mask_token_fraction, config.objective.random_token_fraction
    assert chosen == (0.8, 0.1)  # the remaining tenth is unchanged
    for size in SIZES:  # sizes that Hugging Face's BertForMaskedLM supports
        network = outline(load(size, "bert"))["main"]
        assert network.family == "bert"
        check_expressible(network)


@pytest.mark.parametrize(
    ("size", "width", "rate", "steps", "batch", "length", "generator"),
    [
        ("small", 256, 5e-4, 1_000_000, 128, 128, (64, 1)),
        ("small_plus_plus", 256, 5e-4, 4_000_000, 128, 512, (256, 4)),
        ("base", 768, 2e-4, 766_000, 256, 512, (256, 4)),
    ],
)
def test_electra_is_its_recipe(size, width, rate, steps, batch, length, generator):
    """Table 6 of its paper."""
    config = load("electra", size)
    assert from_config_dict(to_dict(config)) == config
    assert config.name == f"electra-{size}"
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (rate, 10_000)
    assert (config.train.steps, config.train.batch_size) == (steps, batch)
    assert (config.data.length, config.model.hidden_size) == (length, width)
    layer = config.generator_encoder.stages[0].layer
    assert (layer.hidden_size, layer.mixer.attention_heads) == generator
    assert config.encoder.depth == config.generator_encoder.depth == 12
    for network in outline(config).values():
        assert network.family == "electra"
        check_expressible(network)
    # Its code is ConvBERT's official code, except for ConvBERT's changes.
    own = {"model.mask_convolution", "data.release_builder_bug"}
    both = changed_between(load("small", "paper"), config) & RELEASE
    assert both == own


def test_bert_with_its_pairs():
    config, longer, small = (load("bert", size) for size in ("base", "base_512", "small"))
    assert (config.objective.sentence_pairs, config.data.layout) == ("next", "pairs")
    # Fields that base.py:bert leaves out, and dependent fields.
    assert changed_between(config, load("base", "bert")) == {
        "objective.sentence_pairs", "data.layout", "train.steps", "optimizer.decay_to",
        "generator.size", "generator.scan_unroll",  # no generator
    }  # fmt: skip
    # Equal schedules in two runs: linear from 1e-4 to 0 in a million steps.
    first, second = config.optimizer, longer.optimizer
    assert config.train.steps + longer.train.steps == 1_000_000
    whole = first.learning_rate / 1_000_000
    assert first.learning_rate * first.decay_to == pytest.approx(whole * longer.train.steps)
    assert second.learning_rate == pytest.approx(whole * longer.train.steps)
    assert (config.data.length, longer.data.length) == (128, 512)
    assert outline(config)["main"].family == "bert"
    assert (small.train.steps, small.train.batch_size) == (1_450_000, 128)
    assert (small.recipe, small.objective.sentence_pairs) == ("masked_lm", "none")


@pytest.mark.parametrize("size", ["small", "small_plus_plus", "medium_small", "base"])
def test_electra_and_convbert_at_equal_everything(size):
    """Parses the command in configs/electra.py."""
    value = f"configs/electra.py:{size}"
    electra = config_files.make_config(value, {})
    convbert = config_files.make_config(value, {"model.mixer": "mixed"})
    assert changed_between(electra, convbert) == {"model.mixer"}
    assert outline(convbert)["main"].family == "convbert"


def changed_by(name, variant):
    """Returns the fields, except the name, that a variant sets to other than the default."""
    return changed_between(load(name), load(name, variant))


def changed_between(default, other):
    """Returns the fields, except the names, in which two configs differ."""
    changed = set()
    for section in dataclasses.fields(Config):
        first, second = (getattr(config, section.name) for config in (default, other))
        if not dataclasses.is_dataclass(first):
            changed |= {section.name} if first != second else set()
            continue
        for field in dataclasses.fields(first):
            if getattr(first, field.name) != getattr(second, field.name):
                changed.add(f"{section.name}.{field.name}")
    return changed - {"name", "variant"}


RELEASE = {
    "compute_dtype",
    "model.mask_convolution",
    "objective.sample_with_replacement",
    "objective.average_duplicate_ids",
    "objective.prediction_multiple",
    "objective.release_gumbel",
    "objective.release_metrics",
    "optimizer.bias_correction",
    "optimizer.decay_during_warmup",
    "data.layout",
    "data.release_builder_bug",
    "data.release_shuffle",
    "data.shuffle_documents",
    "tokenizer.kind",
    "tokenizer.lowercase",
    "tokenizer.strip_accents",
}


@pytest.mark.parametrize(
    ("name", "rate", "batch", "generator"),
    [
        ("small", 3e-4, 128, (64, 1, 64)),
        ("medium_small", 5e-4, 128, (96, 1, 48)),
        ("base", 2e-4, 256, (256, 2, 64)),
    ],
)
def test_release_hyper_parameters(name, rate, batch, generator):
    """Values from the official `configure_pretraining.py`."""
    config = load(name, "paper")
    assert (config.optimizer.learning_rate, config.train.batch_size) == (rate, batch)
    assert (config.train.steps, config.optimizer.warmup_steps) == (1_000_000, 10_000)
    assert config.max_predictions == config.prediction_slots == 19
    assert load(name).prediction_slots == 24
    layer = config.generator_encoder.stages[0].layer
    assert (layer.hidden_size, layer.mixer.attention_heads, layer.mixer.head_size) == generator
    assert config.generator_encoder.depth == 12
    assert layer.ffn_size == 4 * layer.hidden_size


def test_generator_heads_can_fit_its_width():
    values = to_dict(load("small"))
    values["generator"]["release_heads"] = False
    layer = from_config_dict(values).generator_encoder.stages[0].layer
    assert 2 * layer.mixer.attention_heads * layer.mixer.head_size == layer.hidden_size


@pytest.mark.parametrize(
    ("section", "field", "value", "mentions"),
    [
        ("model", "heads", 3, ""),
        ("model", "head_ratio", 3, ""),
        ("model", "ffn_groups", 3, ""),
        ("model", "mixer", "attenton", "'attention'"),
        ("model", "dropout", 1.0, "1.0"),
        ("model", "layers", 0, "1"),
        ("model", "layers", "12", "int"),
        ("generator", "size", 1.5, "1.5"),
        ("model", "ffn_groups", 0, ""),
        ("generator", "kind", "big", "separate, shared, uniform"),
        ("objective", "mask_fraction", 0.0, ""),
        ("objective", "random_token_fraction", 0.5, "mask_token_fraction"),
        ("data", "length", 4, "4"),
        ("data", "length", 1024, "config.model.positions=512"),
        ("data", "source", "", ""),
        ("tokenizer", "kind", "bbpe", "sentencepiece, wordpiece, bpe, pieces"),
        ("data", "release_builder_bug", True, "config.data.layout"),
        ("data", "heldout_fraction", 0.0, "config.data.validation_source"),
        ("optimizer", "warmup_steps", 10_000_000, "config.train.steps"),
        ("train", "batch_size", 0, ""),
        ("train", "accumulation", 3, "config.train.batch_size"),
        (
            "optimizer",
            "release_replicas",
            3,
            "config.train.batch_size",
        ),
        ("optimizer", "release_replicas", 0, ""),
        ("train", "gradient_dtype", "float16", "bfloat16"),
        ("mesh", "fsdp", -1, "config.mesh"),
    ],
)
def test_faults_are_one_sentence(section, field, value, mentions):
    values = to_dict(load("small"))
    values[section][field] = value
    with refused(ConfigError, field, mentions) as error:
        from_config_dict(values)
    assert "\n" not in str(error.value)


def test_byte_level_bpe_keeps_case_and_accents():
    values = to_dict(load("small"))
    values["tokenizer"] |= {"kind": "bpe", "normalization": "nfc", "lowercase": False}
    assert from_config_dict(values).tokenizer.normalization == "nfc"
    for name in ("lowercase", "strip_accents"):
        wrong = values | {"tokenizer": values["tokenizer"] | {name: True}}
        with refused(ConfigError, "'bpe'", field=f"config.tokenizer.{name}"):
            from_config_dict(wrong)
    values["tokenizer"] |= {"kind": "wordpiece"}
    with refused(ConfigError, field="config.tokenizer.normalization", value="nfc"):
        from_config_dict(values)


def test_pairs_split_into_any_number_of_microbatches():
    """Pair batches are built to size; config.train.batch_size is not used."""
    values = to_dict(load("translation", "tiny"))
    values["train"] |= {"accumulation": 3, "batch_size": 128}
    assert from_config_dict(values).train.accumulation == 3


def test_a_head_ratio_without_effect_is_refused():
    values = to_dict(load("small"))
    values["model"] |= {"mixer": "attention", "head_ratio": 4}
    with refused(ConfigError, "bottleneck", field="config.model.head_ratio", value=4):
        from_config_dict(values)
    values["model"]["head_ratio"] = 2  # the default, as stored in existing runs
    assert from_config_dict(values).encoder.stages[0].layer.mixer.attention_heads == 4
    values["model"]["mixer"] = "bottleneck"
    for ratio in (1, 2, 4):
        values["model"]["head_ratio"] = ratio
        mixer = from_config_dict(values).encoder.stages[0].layer.mixer
        assert (mixer.attention_heads, mixer.head_size) == (4 // ratio, 64)


def test_unmasked_convolution_over_packed_documents_is_refused():
    values = to_dict(load("small"))
    values["model"]["mask_convolution"] = False
    with refused(ConfigError, "config.model.mask_convolution"):
        from_config_dict(values)


def test_unknown_fields_are_refused_with_the_nearest_name():
    with refused(ConfigError, "config.model.heads", field="config.model.haeds"):
        from_config_dict({"model": {"haeds": 4}})
    with refused(ConfigError, field="config.model.1"):
        from_config_dict({"model": {1: 4}})


def test_config_dicts_are_locked():
    with pytest.raises(AttributeError):
        to_config_dict().train.stesp = 3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--config.train.steps=1e5", 100_000),
        ("--config.train.steps=100k", 100_000),
        ("--config.train.steps=2.5M", 2_500_000),
        ("--config.train.steps=10_000", 10_000),
        ("--config.seed=9007199254740993", 9_007_199_254_740_993),  # not representable as float64
        ("--config.optimizer.learning_rate=1", 1.0),
        ("--config.optimizer.learning_rate=.5e-3", 0.0005),
        ("--config.model.mask_convolution=false", False),
        ("--config.name=100k", "100k"),
        ("--config.data.source=text:a=b.txt", "text:a=b.txt"),
        ("--config.finetune.learning_rates=1e-4,3e-4", (1e-4, 3e-4)),
        ("--config.task.texts=(title, body)", ("title", "body")),
        ("--config.task.texts=text (en)", ("text (en)",)),
        ("--config.task.texts=['a', 'b (en)']", ("a", "b (en)")),
        ('--config.task.texts="a",the boss\'', ("a", "the boss'")),
        ("--config.task.texts=[", ("[",)),
        ("--config.finetune.buckets=", ()),
        ('--config.model.mixer_fields=["order=a,b", "name=(x)"]', ("order=a,b", "name=(x)")),
    ],
)
def test_overrides_become_values(given, expected):
    values, rest = overrides.take([given, "--workdir=x"])
    assert list(values.values()) == [expected]
    assert type(next(iter(values.values()))) is type(expected)
    assert rest == ["--workdir=x"]
    assert overrides.take(overrides.to_flags(values))[0] == values


@hypothesis.given(strategies.lists(strategies.text()).map(tuple))
def test_lists_of_any_texts_come_back(texts):
    values = {"model.mixer_fields": texts}
    assert overrides.take(overrides.to_flags(values)) == (values, [])


def test_override_value_may_stand_apart():
    assert overrides.take(["--config.train.steps", "1k"]) == ({"train.steps": 1000}, [])


@pytest.mark.parametrize(
    ("given", "mentions"),
    [
        ("--config.steps=5", "--config.train.steps"),
        ("--config.train.stesp=5", "--config.train.steps"),
        ("--config.train.steps=1.5", "int"),
        ("--config.train.steps=ten", "words"),
        ("--config.train.steps", ""),
        ("--config.model=5", "model.layers"),
        ("--config.model.mask_convolution=perhaps", "true"),
        ("--config.qqqq=5", "--help"),
    ],
)
def test_bad_overrides_are_one_sentence(given, mentions):
    with refused(ConfigError, given.partition("=")[0], mentions):
        overrides.take([given])


# Files that define, bound, check or rewrite fields; uses there do not count.
ABOUT_FIELDS = {"checks", "data", "finetuning", "model", "reading", "training"}


# Attributes that hold a derived config; a section is held by the attribute of its name.
DERIVED = {
    "EmbeddingsConfig": {"embeddings", "config"},
    "EncoderConfig": {"encoder", "config"},
    "LayerConfig": {"layer", "config"},
    "MixerSettings": {"settings"},
    "StageConfig": {"stage"},
    "StageSection": {"sizes"},
}


def fields_read(tree: ast.Module, owners: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Returns (class, field) of each config attribute that a module reads.

    Args:
      owners: class -> names of attributes that hold it, such as `objective` in `config.objective`.
    """
    held = collections.defaultdict(set)  # name in this module -> possible classes
    for cls, names in DERIVED.items():
        for name in names - {"config"}:
            held[name].add(cls)

    def classes(value: ast.expr) -> set[str]:
        if isinstance(value, ast.Name):
            return held[value.id]
        attribute = getattr(value, "attr", None)
        return {cls for cls, attributes in owners.items() if attribute in attributes}

    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            name = node.arg if isinstance(node, ast.arg) else getattr(node.target, "id", "")
            held[name] |= set(re.findall(r"\w+", ast.unparse(node.annotation))) & set(owners)
        if isinstance(node, ast.ClassDef) and node.name in owners:
            held["self"].add(node.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                many = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = [(target, node.value)]
                if many:
                    pairs = zip(target.elts, node.value.elts, strict=True)
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        held[name.id] |= classes(value)
    return {
        (cls, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        for cls in classes(node.value)
    }


def test_every_field_is_read_somewhere():
    """Code of the package reads each field from its section."""
    package = pathlib.Path(config_lib.__file__).parent.parent
    sections = [f for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.type)]
    owners = {section.type.__name__: {section.name} for section in sections}
    owners |= {"Config": {"config"}, **DERIVED}
    read = {("Config", "variant")}  # read by configs/
    for path in package.rglob("*.py"):
        about = path.parent == package / "config" and path.stem in ABOUT_FIELDS
        if not about:
            read |= fields_read(ast.parse(path.read_text()), owners)
    # Read by name: a stage's missing settings come from the model section.
    read |= {("ModelSection", name) for cls, name in read if cls == "StageSection"}
    # Read by name: a mixer takes the settings that its fields name.
    for spec in map(mixers.find, mixers.MIXERS):
        read |= {("MixerSettings", field.name) for field in dataclasses.fields(spec)}
    declared = {(c, f.name) for c in owners for f in dataclasses.fields(getattr(config_lib, c))}
    dead = declared - read
    assert not dead, "nothing reads it"


@pytest.mark.parametrize("recipe", ["masked_lm", "replaced_token"])
def test_named_metrics_are_those_that_an_evaluation_gives(recipe):
    import jax
    import numpy as np

    from convbert_jax.interfaces import SpecialIds
    from convbert_jax.recipes import build_task

    values = to_dict(load("tiny")) | {"recipe": recipe}
    values["objective"]["release_metrics"] = True
    if recipe == "masked_lm":
        values["objective"]["sentence_pairs"], values["data"]["layout"] = "order", "pairs"
    else:
        values["objective"]["masked_lm_steps"] = 1
    config = from_config_dict(values)
    task = build_task(config, SpecialIds(pad=0, unknown=1, cls=2, sep=3, mask=4), jax.devices()[0])
    rows = jax.ShapeDtypeStruct((4, config.data.length), np.int32)
    batch = {name: rows for name in ("tokens", "segment_ids", "type_ids")}
    batch["pair_label"] = jax.ShapeDtypeStruct((4,), np.int32)
    params = jax.eval_shape(task.init, jax.random.key(0))
    sums = jax.eval_shape(task.evaluate, params, batch, jax.random.key(0))
    assert set(sums) == set(RECIPES[recipe].metrics) == set(task.evaluator.names)


@pytest.mark.parametrize("variant", ["light", "dynamic", "dilated"])
@pytest.mark.parametrize("size", ["tiny", "small", "medium_small", "base"])
def test_variants_of_convolutions_alone(size, variant):
    config = load(size, variant)
    mixers = [stage.layer.mixer for stage in config.encoder.stages for _ in range(stage.depth)]
    assert len(mixers) == config.model.layers
    if variant == "dilated":
        assert [mixer.dilation for mixer in mixers[:5]] == [1, 2, 4, 8, 1][: len(mixers)]
    else:
        wanted = [3, 7, 15, 31, 31, 31, 31][: len(mixers)]  # Wu et al. 2019, 7 layers
        assert [mixer.kernel_size for mixer in mixers[:7]] == wanted
    schedule = {"model.kernel_size", "model.kernel_sizes", "model.dilations"}
    assert changed_by(size, variant) <= schedule | {"model.mixer"}
