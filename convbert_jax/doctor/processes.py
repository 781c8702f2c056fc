"""What the processes of a run must have in common; nobody compiles anything for it."""

import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.doctor.finding import Finding, good, warning, wrong
from convbert_jax.training import consistency, distributed

LIMIT = 60.0  # seconds for all to be done with what each checks by itself
_CLOCKS = 1.0  # seconds that they may differ by
_VISIBLE = 5.0  # seconds until a file is seen on other hosts of a network's disk


def compare(
    own: Sequence[Finding], config: Config | None, workdir: epath.Path | None
) -> list[Finding]:
    """What the others found, and what all of them should have in common, the same on all.

    All processes call it, while `workdir` is there on the first one.

    Args:
      own: findings of this process.

    Raises:
      SilentProcessError: the first process does not answer.
    """
    record: dict[str, Any] = {
        "findings": [dataclasses.asdict(f) for f in own if f.state != "good"],
        "versions": consistency.versions(),
        "command": consistency.fields(config) if config else {},
        "workdir": _reads_same(workdir),
    }
    clocks = distributed.clock_offsets(LIMIT)
    judge = functools.partial(_judge, workdir=str(workdir), clocks=clocks)
    return [Finding(**each) for each in distributed.decide(record, judge, LIMIT)]


def _reads_same(workdir: epath.Path | None) -> bool | None:
    """Whether this process reads there what the first one has written; None if that one could
    write nothing, or has no workdir.
    """
    first = distributed.place()[0] == 0
    path, word, same = workdir and workdir / ".doctor-of-all", "", False
    try:
        if first and path:
            word = secrets.token_hex(16)
            try:
                files.write_text(path, word)
            except Exception:  # the libraries of buckets have errors of their own
                word = ""
        word = distributed.broadcast(word, LIMIT)
        ends = time.monotonic() + _VISIBLE
        while path and word and not (same := _has(path, word)) and time.monotonic() < ends:
            time.sleep(0.2)
        distributed.broadcast("", LIMIT)  # all have read it
    finally:
        if first and path:
            with contextlib.suppress(Exception):
                path.unlink(missing_ok=True)
    return same if word else None


def _has(path: epath.Path, word: str) -> bool:
    try:
        return path.read_text() == word
    except Exception:
        return False


def _judge(
    records: Sequence[Mapping[str, Any] | None],
    *,
    workdir: str,
    clocks: Sequence[tuple[float, float] | None],
) -> list[dict[str, str]]:
    """Findings about all, as dicts."""
    findings = []
    by_text: dict[tuple[str, ...], list[int]] = {}
    for index, record in enumerate(records):
        for each in record["findings"] if record and index else ():
            by_text.setdefault(tuple(each.values()), []).append(index)
    for (name, *rest), who in by_text.items():
        findings.append(Finding(f"{name} of {distributed.name_processes(who)}", *rest))
    compared = [r and {name: r[name] for name in ("versions", "command")} for r in records]
    if difference := consistency.find_difference(compared, LIMIT):
        findings.append(Finding("processes", "wrong", difference["message"].rstrip(".")))
    else:
        config = ", same config" if records[0]["command"] else ""
        findings.append(good("processes", f"all {len(records)} answer, same versions{config}"))
    if apart := [i for i, record in enumerate(records) if record and record["workdir"] is False]:
        who = distributed.name_processes(apart)
        text = f"{who} cannot read in {workdir} what process 0 writes there"
        fix = "give all of them the same --workdir, on storage that they share"
        findings.append(wrong("workdir", text, fix))
    elif all(record and record["workdir"] for record in records):
        findings.append(good("workdir", f"{workdir} is one folder for all"))
    return [dataclasses.asdict(each) for each in [*findings, *_judge_clocks(clocks)]]


def _judge_clocks(clocks: Sequence[tuple[float, float] | None]) -> list[Finding]:
    measured = {i: clock for i, clock in enumerate(clocks) if clock}
    if len(measured) < len(clocks):
        return []  # who does not answer is told
    off = {i: ahead for i, (ahead, within) in measured.items() if abs(ahead) - within > _CLOCKS}
    if not off:
        most = max(abs(ahead) + within for ahead, within in measured.values())
        return [good("clocks", f"all within {most:.2g} s of that of process 0")]
    worst = max(off, key=lambda i: abs(off[i]))
    more = f", and {len(off) - 1} more are off" if len(off) > 1 else ""
    text = (
        f"that of process {worst} is {abs(off[worst]):.1f} s "
        f"{'ahead of' if off[worst] > 0 else 'behind'} that of process 0{more}"
    )
    return [warning("clocks", text, "set them by NTP, or times in logs and files mislead")]
