"""Configuration of a run: frozen dataclasses, validated once before any long work.

A config file (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `to_config_dict()`, so
that every field can be overridden as `--config.section.field=value`. `from_config_dict()` converts
it to the frozen dataclass `Config`; only `main.py` and `recipes/` handle ConfigDicts. Every check
raises `ConfigError` with one sentence that names the field, its value and the fix.

sections.py    fields of pre-training
finetuning.py  fields of fine-tuning; own_task.py: a custom labelled data set
sequences/     fields of generative models: architecture, parallel text, decoding
run.py         `Config`, which contains all sections, and derived values
changes.py     which fields may change when a run is resumed
network.py     layer, stage and encoder configs of the model code, derived from the sections
mixers.py      registry and interface of token mixers
implementations.py  names of the implementations of ops
reading.py     conversion from and to mappings
errors.py      exceptions
checks/        validation. pretraining.py, distillation.py, finetuning.py, sequences.py: between
               fields; stages.py: stages; bounds.py: single numbers; rules.py: helpers;
               plugins.py: which custom Python code may be imported
short_runs.py  shorter warm-up and intervals for runs with fewer steps than the config file
"""

from convbert_jax.config.errors import ConfigError, PluginError, UserError
from convbert_jax.config.finetuning import FinetuneSection, OutputsSection
from convbert_jax.config.mixers import Mixer, MixerSettings
from convbert_jax.config.network import (
    EmbeddingsConfig,
    EncoderConfig,
    LayerConfig,
    StageConfig,
)
from convbert_jax.config.own_task import TaskSection
from convbert_jax.config.reading import (
    decided_by_run,
    describe_fields,
    from_config_dict,
    to_config_dict,
    to_dict,
    to_text,
)
from convbert_jax.config.run import Config
from convbert_jax.config.sections import (
    CheckpointSection,
    DataSection,
    DistillationSection,
    GeneratorSection,
    MeshSection,
    ModelSection,
    ObjectiveSection,
    OptimizerSection,
    StageSection,
    TokenizerSection,
    TrainSection,
)
from convbert_jax.config.sequences.sections import (
    DecodingSection,
    ParallelSection,
    SequenceSection,
)
from convbert_jax.config.short_runs import fit_to_steps

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
    "ParallelSection",
    "PluginError",
    "SequenceSection",
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
