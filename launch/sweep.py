"""Runs a table of runs: rows of config differences x seeds, each cell once, with a report.

    python launch/sweep.py --config=configs/ablation.py:kernel_size --plan
    python launch/sweep.py --config=configs/ablation.py:kernel_size --workdir=runs/kernel_size
    python launch/sweep.py … --slurm=8 --sbatch='--partition=gpu --gpus=1 --time=24:00:00'

The same command goes on where it was stopped. Several of them at once, on machines that share the
folder, share the work. What the table, the folder and the report mean: docs/family/sweeps.md.
"""

import errno
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from convbert_jax import absent

with absent.told():
    from absl import logging

    from convbert_jax import console
    from convbert_jax.config import UserError
    from convbert_jax.sweeps import cells as cells_lib
    from convbert_jax.sweeps import request as request_lib
    from convbert_jax.sweeps import results
    from convbert_jax.sweeps.checks.files import check_files
    from convbert_jax.sweeps.slurm import job, submission

_STORAGE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_MISPLACED = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # a file for a folder, or a folder for one


def main() -> None:
    console.set_up_logging()
    logging.set_verbosity(logging.WARNING)  # what a run says of its config is in its own log
    try:
        request = request_lib.read(sys.argv, __doc__)
        if request.do == "submit":
            submission.check_installed()
        cells = cells_lib.expand(request.sweep, request.folder, request.overrides)
        results.check_metrics(request.sweep, cells)
    except UserError as error:
        console.fail(str(error), code=2)
    except KeyboardInterrupt:
        console.fail("interrupted; nothing was begun.", code=130)
    try:
        from convbert_jax.training.environment import devices

        devices.prepare_platform("cpu")  # accelerators are for the cells, which are processes
        explorer = None
        begins = request.do in ("run", "submit")
        if request.sweep.search and (begins or request.folder.journal.exists()):
            from convbert_jax.sweeps.search import Explorer

            explorer = Explorer(request.sweep, request.folder, request.overrides)
            cells = _expand(request, explorer)
        new, gone = cells_lib.check_unchanged(cells, request.folder)
        if request.do == "submit":
            _submit(request, cells)
            return
        if request.do == "plan":
            from convbert_jax.sweeps import describe

            sweep = explorer.sweep if explorer else request.sweep
            print(describe.describe(sweep, cells, request.folder, request.topology, request.price))
            return
        failed = 0 if request.do == "report" else _run(request, cells, explorer, new, gone)
        from convbert_jax.analysis import sweep_report

        sweep = request.sweep
        if explorer:
            sweep, cells = explorer.sweep, _expand(request, explorer)
        with request.folder.alone("report"):  # runners end together
            outcome = results.collect(request.name, sweep, cells, request.folder)
            report = sweep_report.write(outcome, request.folder.report)
        print(f"\n{report}\nReport: {request.folder.report}", flush=True)
    except UserError as error:
        console.fail(str(error))
    except KeyboardInterrupt:  # the second one, or while a report is drawn
        console.fail("interrupted; the same command goes on from what is finished.", code=130)
    except OSError as error:
        if error.errno in _MISPLACED:
            console.fail(f"{error.filename}: {error.strerror}; move it away, then start again.")
        if error.errno not in _STORAGE_FAULTS:
            raise
        console.fail(
            f"{error.filename or request.folder}: {error.strerror}; free some space or choose "
            "another --workdir, then start again: what was finished is kept."
        )
    if failed:
        console.fail(f"{failed} of {len(cells)} cells failed; start again to try them again.")


def _expand(request: request_lib.Request, explorer) -> list[cells_lib.Cell]:
    """The cells of a search so far."""
    return cells_lib.expand(explorer.sweep, request.folder, request.overrides)


def _run(request: request_lib.Request, cells, explorer, new: int, gone: list[str]) -> int:
    """How many cells failed."""
    from convbert_jax.sweeps import runner

    if gone:
        _tell(f"no longer in the table, kept and left out: {', '.join(gone)}")
    if 0 < new < len(cells):
        _tell(f"{new} of {len(cells)} cells have not begun.")
    check_files(cells, request.folder)
    metrics = results.choose_metrics(request.sweep, cells[0].config)
    summary = runner.run(cells, request.folder, tell=_tell, metrics=metrics, explorer=explorer)
    if summary.stopped:
        console.fail("stopped; the same command goes on from there.", code=130)
    for cell, why in summary.failed.items():
        _tell(f"failed: {cell}: {why}")
    return len(summary.failed)


def _submit(request: request_lib.Request, cells) -> None:
    check_files(cells, request.folder)
    runner = (sys.executable, str(pathlib.Path(__file__).resolve()), *request.arguments)
    jobs = submission.submit(
        f"sweep-{request.name}",
        request.folder,
        job.Job(runner, str(pathlib.Path.cwd())),
        request.runners,
        request.sbatch,
    )
    logs = request.folder.path / "slurm"
    print(
        f"{len(jobs)} runners of {len(cells)} cells are in the queue: job "
        f"{jobs[0].partition('_')[0]}; they print to {logs}/JOB_0_log.out. "
        "--report writes what there is at any time."
    )


def _tell(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
