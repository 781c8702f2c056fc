"""What a check says."""

import dataclasses
import threading
from collections.abc import Callable, Sequence

from convbert_jax.config import UserError

STATES = ("good", "warning", "wrong")
_threads: list[threading.Thread] = []


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of --mode=doctor.

    Attributes:
      name: what was looked at, as "workdir".
      state: good | warning (a run may start, and be slow or unsafe) | wrong (it would fail).
      text: what was found, without a full stop.
      fix: what to do, likewise; "" where there is nothing to do.
    """

    name: str
    state: str
    text: str
    fix: str = ""

    def __post_init__(self):
        if self.state not in STATES:
            raise ValueError(f"state={self.state!r} must be one of {', '.join(STATES)}.")

    def __str__(self) -> str:
        fix = f"; {self.fix}" if self.fix else ""
        return " ".join(f"{self.state:<8}{self.name}: {self.text}{fix}.".splitlines())


def good(name: str, text: str) -> Finding:
    return Finding(name, "good", text)


def warning(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "warning", text, fix)


def wrong(name: str, text: str, fix: str) -> Finding:
    return Finding(name, "wrong", text, fix)


def run(
    name: str,
    check: Callable[[], Sequence[Finding]],
    *,
    limit: float,
    late: str = "wrong",
) -> list[Finding]:
    """What `check` finds; that it raises, or takes more than `limit` seconds, is a finding too.

    Args:
      name: of the finding in these cases.
      late: its state where the time is up; the check goes on in a thread of its own, which cannot
        be stopped.
    """
    found: list[Finding] = []

    def call():
        try:
            found.extend(check())
        except UserError as error:
            found.append(Finding(name, "wrong", str(error).rstrip(".")))
        except BaseException as error:
            what = (str(error).strip().splitlines() or ["no message"])[0][:200].rstrip(".")
            found.append(
                wrong(
                    name,
                    f"this could not be checked ({type(error).__name__}: {what})",
                    "look at that first: a run would come to it too",
                )
            )

    thread = threading.Thread(target=call, daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        text = f"no answer within {limit:.0f} s"
        return [Finding(name, late, text, "find out what keeps it; a run would wait there too")]
    return found


def is_stuck() -> bool:
    """Whether a check still runs, so that Python may not come to its end by itself."""
    return any(thread.is_alive() for thread in _threads)
