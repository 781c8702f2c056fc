"""What a run is: frozen dataclasses, checked and derived once, before any long work.

A config file (`configs/*.py`) returns an `ml_collections.ConfigDict` made by `to_config_dict()`, so
that every field can be overridden as `--config.section.field=value`. `from_config_dict()` turns it
into the frozen dataclass `Config`, and nothing beyond `main.py` and `recipes/` ever sees a
ConfigDict. Every check raises `ConfigError` with one sentence that names the field, its value and
the fix.

sections.py    every field of pre-training, with its comment: what a user sets
finetuning.py  those of fine-tuning; own_task.py a labelled data set of the user's own
sequences/     those of models that write text, their pairs and how they write
run.py         the sections together, and what follows from them
changes.py     which fields may change between two starts of one run, said at each as its type
network.py     what the model code is built from, and how it follows from the sections
mixers.py      token mixers by name, and what each must say
implementations.py  of ops, by name
reading.py     from and to mappings
errors.py      what every check raises
checks/        pretraining.py, distillation.py, finetuning.py and sequences.py what must hold
               between fields, stages.py in stages,
               bounds.py of single numbers; rules.py what checks are made of; plugins.py which
               Python of the user's own may be imported
short_runs.py  intervals that fit into fewer steps than a config file is made for
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
