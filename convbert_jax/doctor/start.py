"""Checks that the vocabulary, weights and data of a config exist."""

from collections.abc import Collection
from pathlib import Path

from etils import epath

from convbert_jax.config import Config
from convbert_jax.data import bucket, parallel_text
from convbert_jax.data.corpus import read_metadata
from convbert_jax.data.parallel_text import read_metadata as read_metadata_of_pairs
from convbert_jax.data.readers.sources import REMOTE, open_source
from convbert_jax.doctor.finding import Finding, good
from convbert_jax.interop.networks import abstract_params
from convbert_jax.recipes import finetuning, start
from convbert_jax.storage import is_remote
from convbert_jax.training import partitioning
from convbert_jax.workdir import Workdir


class Start:
    """Initial state of a run.

    Attributes:
      config: config; `check` completes it from the vocabulary and the weights.
      parameters: number of parameters of the model; 0 before `check`.
    """

    def __init__(self, config: Config, workdir: epath.Path, given: Collection[str]):
        self.config, self.parameters = config, 0
        self._workdir, self._given = workdir, given

    def check(self) -> list[Finding]:
        """Reads vocabulary and weights; raises the UserErrors of a start."""
        if self.config.recipe == "finetune":
            self.config = finetuning.read_start(self.config, self._given)[0]
        else:
            folder = Workdir(self._workdir)
            self.config = start.read_start(self.config, folder, self._given)[0]
        self.parameters = partitioning.count_params(abstract_params(self.config))
        named = {
            "config.tokenizer.path": self.config.tokenizer.path,
            "config.init_from": self.config.init_from,
            "config.distillation.teacher": self.config.distillation.teacher,
        }
        read = [f"{field}={value} is readable" for field, value in named.items() if value]
        return [good("start", ", ".join([f"{self.parameters:,} parameters", *read]))]

    def check_data(self) -> list[Finding]:
        """Checks that the data exists, without reading all of it; raises UserError otherwise."""
        if self.config.recipe == "finetune":
            finetuning.check_tasks(self.config)
            tasks = ", ".join(self.config.finetune.tasks)
            return [good("data", f"the files of {tasks} exist")]
        directory = Workdir(self._workdir).data(self.config)
        if is_remote(directory) and (listed := bucket.list_files(directory)):
            size = sum(size for size, _ in listed.values()) / 1e9
            text = f"{directory} is prepared, {size:.2f} GB to copy to {self.config.data.cache}"
            return [good("data", text)]
        read = read_metadata_of_pairs if self.config.reads_pairs else read_metadata
        metadata = read(Path(directory))
        if metadata and metadata["complete"]:
            return [good("data", f"{directory} is prepared")]
        if self.config.reads_pairs:
            named = parallel_text.open_sources(self.config)
            return [good("data", ", ".join(f"{source.name} exists" for source in named.values()))]
        section = self.config.data
        specs = [section.source, *filter(None, [section.validation_source])]
        return [good("data", ", ".join(map(self._look, specs)))]

    def _look(self, spec: str) -> str:
        kind, _, rest = spec.partition(":")
        if kind in REMOTE or (kind == "tfds" and not Path(rest).is_dir()):
            return f"{spec} will be downloaded when the run starts (not checked)"
        open_source(self.config.data, spec)
        return f"{spec} exists"
