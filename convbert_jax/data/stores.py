"""The module of a config's prepared data: `corpus`, `mixture` or `parallel_text`.

They have the same functions `prepare`, `open_prepared` and `read_metadata`.
"""

from pathlib import Path
from types import ModuleType

from convbert_jax.config import Config
from convbert_jax.data import corpus, mixture, pair_worker, parallel_text
from convbert_jax.data.readers.sources import REMOTE, open_source

# Fine-tuning has no rows of its own; its vocabulary may be that of a corpus.
_STORES = {"data": corpus, "parallel": parallel_text, "task": corpus}


def store_of(config: Config) -> ModuleType:
    """Returns the module that prepares and opens the data of a config."""
    return mixture if config.data.mixture else _STORES[config.spec.data]


def check_sources(config: Config) -> list[str]:
    """Checks that the files of a source exist, without reading all of them.

    Returns:
      A sentence for each source.

    Raises:
      DataError: a file does not exist or cannot be read.
    """
    return _CHECKS[config.spec.data](config)


def _check_corpus(config: Config) -> list[str]:
    found = []
    for spec in config.data.specs:
        kind, _, rest = spec.partition(":")
        if kind in REMOTE or (kind == "tfds" and not Path(rest).is_dir()):
            found.append(f"{spec} will be downloaded when the run starts (not checked)")
        else:
            open_source(config.data, spec)
            found.append(f"{spec} exists")
    return found


def _check_pairs(config: Config) -> list[str]:
    return [f"{source.name} exists" for source in parallel_text.open_sources(config).values()]


_CHECKS = {"data": _check_corpus, "parallel": _check_pairs}


def read_fingerprints(config: Config, directory: Path) -> dict[str, str]:
    """Returns name -> fingerprint of the vocabularies of the rows in a folder, if any.

    The name of a single vocabulary is "".
    """
    metadata = store_of(config).read_metadata(directory)
    if not metadata:
        return {}
    found = metadata.get("tokenizers") or [metadata["tokenizer"]]
    return dict(zip((name for name, _ in pair_worker.list_sections(config)), found, strict=False))
