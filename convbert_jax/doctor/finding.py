"""Results of checks."""

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
      name: subject of the check, for example "workdir".
      state: good | warning (a run can start but may be slow or unsafe) | wrong (it would fail).
      text: result, without a final period.
      fix: remedy, without a final period; "" if none is needed.
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
    """Runs `check` and returns its findings, or a finding that it failed or timed out.

    Args:
      name: name of the finding for a failure or timeout.
      limit: timeout in seconds; the check continues in a thread, which cannot be stopped.
      late: state of the finding for a timeout.
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
                    f"the check failed ({type(error).__name__}: {what})",
                    "resolve this first: a run would fail too",
                )
            )

    thread = threading.Thread(target=call, daemon=True)
    _threads.append(thread)
    thread.start()
    thread.join(limit)
    if thread.is_alive():
        text = f"no answer within {limit:.0f} s"
        return [Finding(name, late, text, "find the cause: a run would wait there too")]
    return found


def is_stuck() -> bool:
    """Returns whether a check is still running, which may prevent Python from exiting."""
    return any(thread.is_alive() for thread in _threads)
