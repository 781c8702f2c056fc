"""Exit codes of `python -m convbert_jax.main`."""

import signal

from convbert_jax import interrupts

FAILED, INVALID = 1, 2
# Exit code -> meaning, in --help and in docs/reference/command_line.md.
EXIT_CODES = {
    0: "The work is complete.",
    FAILED: "Error in data, weights, storage or numbers. --mode=doctor: a run would fail here. "
    "--mode=plan: the run does not fit.",
    INVALID: "Error in a flag, a config file or a field; nothing was started.",
    interrupts.TRY_AGAIN: "Stopped by SIGTERM, or another process of the run was lost. Finished "
    "work is saved: start the same command again.",
    interrupts.exit_code("SIGINT"): "Stopped by Ctrl-C (SIGINT). Finished work is saved: the same "
    "command continues.",
    128 + signal.SIGTERM: "Stopped by a second SIGTERM before the work was saved. The same command "
    "continues from the last checkpoint.",
}
