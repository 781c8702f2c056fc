"""Metadata of prepared pairs: their settings, sources, counts and shards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.data.corpus.metadata import METADATA, describe_sources
from convbert_jax.data.errors import DataError
from convbert_jax.data.parallel import vocabularies
from convbert_jax.data.parallel.pair_source import PairSource
from convbert_jax.data.parallel.pair_worker import FAULTS
from convbert_jax.data.parallel.vocabularies import Vocabularies
from convbert_jax.data.records import read_record
from convbert_jax.data.units.changes import elsewhere

VERSION = 1  # increment it when the same config produces different rows
KIND = "parallel"
METADATA_FIELDS = {"complete": bool, "made_from": dict, "stamps": dict}
SUMMARY_FIELDS = {
    "tokenizers": list,
    "digests": list,
    "splits": {"train": list, "validation": list},
    "faults": dict,
}
SHARD_FIELDS = (
    *("unit", "rows", "file_bytes", "crc32", "lengths_crc32"),
    *("source_tokens", "target_tokens"),
)


def origin(config: Config, sources: Mapping[str, PairSource] | None) -> dict[str, Any]:
    """Returns all settings that determine the rows, by the names used in error messages."""
    section = config.parallel
    result = {
        "kind": KIND,
        "version": VERSION,
        "vocabularies": vocabularies.describe(config),
        "max_length": section.max_length,
        "max_ratio": section.max_ratio,
        "sampling": section.sampling,
        "heldout_fraction": 0 if section.validation_source else section.heldout_fraction,
        "source": section.source,
        "validation_source": section.validation_source,
    }
    if section.cut_sources:
        result["cut_sources"] = True
    if sources:
        result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
    return result


def refuse_other(wanted: dict, there: dict, directory: Path, changed: Sequence[str] = ()) -> None:
    """Raises DataError unless the `origin` of a folder matches the wanted one.

    Paths of sources and vocabularies are ignored if their content is known.

    Args:
      changed: paths of changed source files, for the message.
    """
    compared = ("source", "validation_source", "fingerprints", "vocabularies")
    names = [name for name in wanted if name not in compared]
    names += {"cut_sources"} - set(names)  # recorded only if sources are truncated
    if "fingerprints" not in wanted:
        names += ["source", "validation_source"]
    old, new = there.get("vocabularies", []), wanted["vocabularies"]
    if [_trained(one) for one in old] != [_trained(one) for one in new]:
        names.append("vocabularies")
    different = [
        f"{name} (prepared: {there.get(name)!r}, config: {wanted.get(name)!r})"
        for name in names
        if there.get(name) != wanted.get(name)
    ]
    if "fingerprints" in wanted:
        different += describe_sources(wanted["fingerprints"], there, changed)
    if different:
        raise DataError(
            f"{directory} contains different data. Differences: {', '.join(different)}. Restore "
            f"these settings, or prepare new data with {elsewhere(directory)}.",
            path=directory,
        )


def _trained(vocabulary: dict) -> dict:
    return {"path": ""} if "path" in vocabulary else vocabulary


def refuse_changed(made: Vocabularies, fingerprints: list[str], directory: Path) -> None:
    for tokenizer, fingerprint in zip(made, fingerprints, strict=True):
        if tokenizer.fingerprint != fingerprint:
            raise DataError(
                f"The vocabulary or normalization in {tokenizer.path} changed after {directory} "
                f"was prepared. Restore it, or prepare new data with {elsewhere(directory)}.",
                path=directory,
            )


def read_metadata(directory: Path) -> dict[str, Any] | None:
    path = directory / METADATA
    if not path.is_file():
        return None
    remedy = f"restore a copy, or prepare new data with {elsewhere(directory)}"
    metadata = read_record(path, remedy=remedy, fields=METADATA_FIELDS)
    if metadata["complete"] and metadata["made_from"].get("kind") == KIND:
        metadata = read_record(path, remedy=remedy, fields=METADATA_FIELDS | SUMMARY_FIELDS)
        for shards in metadata["splits"].values():
            for shard in shards:
                if not isinstance(shard, dict) or not set(SHARD_FIELDS) <= set(shard):
                    raise files.damaged(path, "an entry of its list of shards is invalid", remedy)
    return metadata


def summary(records: list[dict]) -> dict[str, Any]:
    splits = {
        name: [
            {"unit": record["unit"], **record["splits"][name]}
            for record in records
            if record["splits"][name]["rows"]
        ]
        for name in ("train", "validation")
    }
    faults = {}
    for kind in FAULTS:
        of_kind = [record["faults"][kind] for record in records if kind in record["faults"]]
        if of_kind:
            faults[kind] = [sum(count for count, _ in of_kind), of_kind[0][1]]
    totals = {
        key: sum(record[key] for record in records)
        for key in ("bytes", "characters", "unknown", "pairs")
    }
    cut = [record["cut"] for record in records if record.get("cut", [0])[0]]
    first = cut[0][1] if cut else ""
    return {
        "splits": splits,
        "digests": [record["digest"] for record in records],
        "faults": faults,
        "cut": [sum(count for count, _ in cut), first],
        **totals,
    }
