"""Whether the rows of a table can be and differ, and if not, who is at fault: a row, what the
command line sets for all of them, or both together.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from convbert_jax import config_files
from convbert_jax.command_line.overrides import to_flags
from convbert_jax.config import Config, ModelSection, UserError, changes, network, to_dict
from convbert_jax.sweeps.folder import Folder
from convbert_jax.sweeps.table import Cell, Sweep, SweepError


class RowError(SweepError):
    """A row whose config cannot be: its name, what was changed, why not."""

    def __init__(self, row: str, changed: Mapping[str, Any], why: str):
        super().__init__(f"row {row}: {why}")
        self.row, self.changed, self.why = row, changed, why


def make_row(name: str, base: str, changed: Mapping[str, Any]) -> Config:
    try:
        return config_files.make_config(base, dict(changed))
    except UserError as error:
        raise RowError(name, changed, str(error)) from error


def _without(path: str, changed: Mapping[str, Any], sweep: Sweep) -> dict[str, Any]:
    """What is changed where nobody overrides `path`."""
    left = {name: value for name, value in changed.items() if name != path}
    return left | {name: value for name, value in sweep.changes.items() if name == path}


def explain(error: RowError, sweep: Sweep, overrides: Mapping[str, Any]) -> SweepError:
    """Whether the row is at fault, or what all rows have, or both together."""

    def why_not(changed: Mapping[str, Any]) -> str:
        try:
            config_files.make_config(sweep.config, dict(changed))
        except UserError as found:
            return str(found)
        return ""

    if why_not({**sweep.changes, **overrides}) == error.why:
        return SweepError(error.why)
    guilty = [p for p in overrides if not why_not(_without(p, error.changed, sweep))]
    flags = " and ".join(to_flags({path: overrides[path] for path in guilty}))
    return SweepError(f"row {error.row}{' with ' if flags else ''}{flags}: {error.why}")


def check_differ(cells: Sequence[Cell], sweep: Sweep, overrides: Mapping[str, Any]) -> None:
    seen: dict[str, Cell] = {}
    for cell in cells:
        if cell.seed != sweep.seeds[0] or cell.after:
            continue
        other = seen.setdefault(what_is_read(cell.config), cell)
        if other is cell:
            continue
        rows = f"rows {other.row} and {cell.row}"
        found = changes.differences(to_dict(other.config), to_dict(cell.config))
        if not found:
            raise SweepError(f"{rows} are the same config; leave one out.")
        fields = " and ".join(f"config.{path}" for path in found)
        guilty = [path for path in overrides if _differ_without(path, (other, cell), sweep)]
        flags = " and ".join(to_flags({path: overrides[path] for path in guilty}))
        which = " or ".join(["one row", *(f"--config.{path}" for path in guilty)])
        raise SweepError(
            f"{rows} are the same model{' with ' if flags else ''}{flags}: it does not read "
            f"{fields}; leave out {which}."
        )


def _differ_without(path: str, pair: tuple[Cell, Cell], sweep: Sweep) -> bool:
    try:
        read = [
            what_is_read(make_row(cell.row, cell.base, _without(path, cell.changed, sweep)))
            for cell in pair
        ]
    except SweepError:
        return False
    return read[0] != read[1]


def check_shards(cells: Sequence[Cell], folder: Folder, overrides: Mapping[str, Any]) -> None:
    """One folder cannot have the rows of two lengths."""
    if "data.directory" not in overrides:
        return
    first = next(cell for cell in cells if not cell.after)
    for cell in cells:
        if cell.after or folder.data(cell.config) == folder.data(first.config):
            continue
        raise SweepError(
            f"--config.data.directory={overrides['data.directory']} cannot have the rows of tokens "
            f"of {first.row} and of {cell.row}, which differ; leave it out, then each has its own."
        )


def what_is_read(config: Config) -> str:
    """What tells the runs of two configs apart: all fields but those without effect."""
    if config.recipe == "finetune" or config.writes_text:
        return repr(config)
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    default = ModelSection()
    idle = {name: getattr(default, name) for name in network.idle_fields(config.model)}
    fields["model"] = dataclasses.replace(config.model, **idle)
    if config.recipe == "masked_lm":
        del fields["generator"]  # it has none
    return repr(fields)
