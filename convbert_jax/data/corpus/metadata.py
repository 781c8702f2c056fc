"""Metadata of a prepared corpus: its settings, sources, counts and shards."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convbert_jax import files
from convbert_jax.config import Config, TokenizerSection
from convbert_jax.data.corpus.shards import shard_path
from convbert_jax.data.errors import DataError, shorten
from convbert_jax.data.records import read_record
from convbert_jax.data.sources.source import Source
from convbert_jax.data.tokenizer.tokenizer import training_settings
from convbert_jax.data.units.changes import elsewhere

# Version of the rows of each layout; increment it when the same config produces different rows.
VERSIONS = {"packed": 1, "electra": 1, "pairs": 2}
METADATA = "metadata.json"
METADATA_FIELDS = {
    "complete": bool,
    "made_from": {
        "version": int,
        "layout": str,
        "length": int,
        "tokenizer": dict,
        "heldout_fraction": (int, float),
        "source": str,
        "validation_source": str,
        "fingerprints": dict,
    },
    "tokenizer": str,
    "heldout": {"fraction": (int, float), "pieces": int},
    "stamps": dict,
}
SPLIT_FIELDS = {"rows": int, "tokens": int, "documents": int, "shards": list}
SUMMARY_FIELDS = {
    "splits": {"train": SPLIT_FIELDS, "validation": SPLIT_FIELDS},
    "digests": list,
    "undecodable": int,
    "encoding_errors": str,
}


def origin(config: Config, sources: dict[str, Source] | None) -> dict[str, Any]:
    """Returns all settings that determine the rows, by the names used in error messages.

    Args:
      sources: sources by split; None if they are missing or remote.
    """
    data = config.data
    layout = data.layout + (" with the release's bug" if data.release_builder_bug else "")
    layout += f" ({config.objective.sentence_pairs})" if data.layout == "pairs" else ""
    layout += " of shuffled documents" if data.shuffle_documents else ""
    result = {
        "version": VERSIONS[data.layout],
        "layout": layout,
        "length": data.length,
        "tokenizer": describe_tokenizer(config.tokenizer),
        "heldout_fraction": 0 if data.validation_source else data.heldout_fraction,
        "source": data.source,
        "validation_source": data.validation_source,
    }
    if sources:
        result["fingerprints"] = {name: source.fingerprint for name, source in sources.items()}
    return result


def describe_tokenizer(section: TokenizerSection) -> dict[str, Any]:
    """Returns the path of a vocabulary, whose content is compared later, or its settings."""
    return {"path": section.path} if section.path else training_settings(section)


def refuse_other(wanted: dict, there: dict, directory: Path, changed: Sequence[str] = ()) -> None:
    """Raises DataError unless the `origin` of a folder matches the wanted one.

    Args:
      changed: paths of changed source files, for the message.
    """
    different = [
        f"{name} (prepared: {there.get(name)!r}, config: {wanted[name]!r})"
        for name in ("version", "layout", "length", "heldout_fraction")
        if there.get(name) != wanted[name]
    ]
    old, new = there.get("tokenizer", {}), wanted["tokenizer"]
    if "path" not in new or "path" not in old:  # the content of vocabulary files is compared later
        different += [
            f"tokenizer.{name} (prepared: {old.get(name)!r}, config: {new.get(name)!r})"
            for name in sorted({*old, *new})
            if new.get(name) not in (old.get(name), "auto")
        ]
    if "fingerprints" in wanted:
        different += describe_sources(wanted["fingerprints"], there, changed)
    elif any(there.get(key) != wanted[key] for key in ("source", "validation_source")):
        different.append(
            f"source (prepared: {there.get('source')!r}, config: {wanted['source']!r})"
        )
    if different:
        raise DataError(
            f"{directory} contains a different corpus. Differences: {', '.join(different)}. "
            f"Restore these settings, or prepare a new corpus with {elsewhere(directory)}.",
            path=directory,
        )


def describe_sources(
    fingerprints: Mapping[str, str], there: dict, changed: Sequence[str]
) -> list[str]:
    """Describes the sources that differ from the sources of a folder, for `refuse_other`."""
    files = f": {shorten(', '.join(changed))}" if changed else ""
    specs = {"train": there.get("source"), "validation": there.get("validation_source")}
    return [
        f"the {name} source (files, content or format of {spec!r} changed after the "
        f"preparation{files})"
        for name, spec in specs.items()
        if there.get("fingerprints", {}).get(name) != fingerprints.get(name)
    ]


def has_finished_units(directory: Path) -> bool:
    return any((directory / "units").glob("*.json"))


def refuse_units_of_unknown(directory: Path) -> None:
    """Checks that a folder without metadata has no finished units.

    Raises:
      DataError: it has finished units, whose settings are therefore unknown.
    """
    if has_finished_units(directory):
        raise DataError(
            f"{directory} has finished units but no {METADATA} with their settings. Restore a copy "
            "of it, or delete the folder to prepare it again.",
            path=directory,
        )


def read_metadata(directory: Path) -> dict[str, Any] | None:
    """Reads the metadata of a folder; None if it has none.

    Raises:
      DamagedFileError: the file is not in the form that was written.
    """
    path = directory / METADATA
    if not path.is_file():
        return None
    remedy = f"restore a copy, or prepare a new corpus with {elsewhere(directory)}"
    metadata = read_record(path, remedy=remedy, fields=METADATA_FIELDS)
    if metadata["complete"]:
        metadata = read_record(path, remedy=remedy, fields=METADATA_FIELDS | SUMMARY_FIELDS)
        for split in metadata["splits"].values():
            for shard in split["shards"]:
                kinds = [str, int, int, int][: len(shard)] if isinstance(shard, list) else []
                if len(kinds) < 3 or list(map(type, shard)) != kinds:
                    raise files.damaged(path, "an entry of its list of shards is invalid", remedy)
    return metadata


def summary(records: list[dict], length: int, seconds: float) -> dict[str, Any]:
    """Sums the counts of all units and lists the shards: (file, rows, bytes, CRC-32)."""
    splits = {}
    for name in ("train", "validation"):
        parts = [record["splits"][name] for record in records]
        total = {
            key: sum(part.get(key, 0) for part in parts) for key in ("rows", "tokens", "documents")
        }
        if all("pairs" in part for part in parts):
            total["pairs"] = sum(part["pairs"] for part in parts)
        total["fill"] = round(total["tokens"] / max(1, total["rows"] * length), 4)
        total["shards"] = [
            [
                shard_path(Path(), name, record["unit"]).name,
                part["rows"],
                part["file_bytes"],
                *([part["crc32"]] if "crc32" in part else []),
            ]
            for record, part in zip(records, parts, strict=True)
            if part["rows"]
        ]
        splits[name] = total
    totals = {
        key: sum(record[key] for record in records)
        for key in ("bytes", "dropped", "characters", "unknown", "undecodable", "skipped")
    }
    policies = [record["encoding_errors"] for record in records if record["undecodable"]]
    return {
        "splits": splits,
        "digests": [record["digest"] for record in records],
        **totals,
        "unknown_rate": totals["unknown"] / max(1, totals["characters"]),
        "encoding_errors": policies[0] if policies else "error",
        "seconds": round(seconds, 1),
    }
