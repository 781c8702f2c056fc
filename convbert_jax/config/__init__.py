"""Configuration of a run: frozen dataclasses, validated once before any long work.

A config file (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `to_config_dict()`, so
that every field can be overridden as `--config.section.field=value`. `from_config_dict()` converts
it to the frozen dataclass `Config`; only `main.py` and `recipes/` handle ConfigDicts. Every check
raises `ConfigError` with one sentence that names the field, its value and the fix.

model.py       sections of the network and the generator
data.py        sections of the vocabulary, the corpus, a mixture and a custom labelled data set
training.py    sections of pre-training: objective, distillation, optimizer, phases, loop,
               checkpoints, mesh
sequences.py   sections of generative models: decoder, pairs of texts, generation
finetuning.py  sections of fine-tuning, and the head of a task
run.py         `Config`, which contains all sections, and derived values
lengths.py     lengths as texts, "100M words", and their conversion to steps
fields.py      annotations of fields: bounds, choices, changes on resume; their check
checks.py      validation: rules between fields
changes.py     which fields may change when a run is resumed, and differences of two configs
network.py     layer, encoder and decoder configs of the model code, derived from the sections
mixers.py      registry and interface of token mixers
plugins.py     which custom Python code may be imported
reading.py     conversion from and to mappings
errors.py      exceptions
"""

from convbert_jax.config.data import DataSection, SourceSection, TaskSection, TokenizerSection
from convbert_jax.config.errors import ConfigError, PluginError, UserError
from convbert_jax.config.finetuning import FinetuneSection, OutputsSection
from convbert_jax.config.mixers import Mixer, MixerSettings
from convbert_jax.config.model import GeneratorSection, ModelSection, StageSection
from convbert_jax.config.network import (
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    StageConfig,
)
from convbert_jax.config.reading import (
    decided_by_run,
    describe_fields,
    from_config_dict,
    to_config_dict,
    to_dict,
    to_text,
)
from convbert_jax.config.run import Config, fit_to_steps
from convbert_jax.config.sequences import (
    DecodingSection,
    PairFormat,
    ParallelSection,
    SequenceSection,
)
from convbert_jax.config.training import (
    CheckpointSection,
    DistillationSection,
    MeshSection,
    ObjectiveSection,
    OptimizerSection,
    PhaseSection,
    TrainSection,
)

__all__ = [
    "CheckpointSection",
    "Config",
    "ConfigError",
    "DataSection",
    "DecodingSection",
    "DistillationSection",
    "EmbeddingsConfig",
    "EncoderConfig",
    "FinetuneSection",
    "GeneratorSection",
    "LayerConfig",
    "MeshSection",
    "Mixer",
    "MixerSettings",
    "ModelSection",
    "ObjectiveSection",
    "OptimizerSection",
    "OutputsSection",
    "PairFormat",
    "ParallelSection",
    "PhaseSection",
    "PluginError",
    "SequenceSection",
    "SourceSection",
    "StageConfig",
    "StageSection",
    "TaskSection",
    "TokenizerSection",
    "TrainSection",
    "UserError",
    "decided_by_run",
    "describe_fields",
    "fit_to_steps",
    "from_config_dict",
    "to_config_dict",
    "to_dict",
    "to_text",
]
