"""Runs a sweep: variants of a config x seeds, each run once, and a report that compares them.

    python launch/sweep.py --config=configs/ablation.py:kernel_size --plan
    python launch/sweep.py --config=configs/ablation.py:kernel_size --workdir=runs/kernel_size
    python launch/sweep.py … --slurm=8 --sbatch='--partition=gpu --gpus=1 --time=24:00:00'

The same command resumes an interrupted sweep. Several workers that share the folder, on one or
several machines, divide the runs. Documentation: docs/howto/sweep.md.
"""

import errno
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from convbert_jax import console

with console.missing_package_message():
    from absl import logging

    from convbert_jax import console
    from convbert_jax.config import UserError
    from convbert_jax.sweeps import cli, results, runs

_STORAGE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
_MISPLACED = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # a file for a folder, or vice versa


def main() -> None:
    console.set_up_logging()
    logging.set_verbosity(logging.WARNING)  # each run has its own log
    try:
        request = cli.read(sys.argv, __doc__)
        if request.action == "submit":
            cli.check_installed()
        expanded = runs.expand(request.sweep, request.folder, request.overrides)
        results.check_metrics(request.sweep, expanded)
    except UserError as error:
        console.fail(str(error), code=2)
    except KeyboardInterrupt:
        console.fail("interrupted before any run started.", code=130)
    try:
        _answer(request, expanded)
    except UserError as error:
        console.fail(str(error))
    except KeyboardInterrupt:  # the second one, or while the report is written
        console.fail("interrupted. The same command resumes the sweep.", code=130)
    except OSError as error:
        if error.errno in _MISPLACED:
            console.fail(f"{error.filename}: {error.strerror}. Move it away and start again.")
        if error.errno not in _STORAGE_FAULTS:
            raise
        console.fail(
            f"{error.filename or request.folder}: {error.strerror}. Free disk space and start "
            "again; finished runs are kept."
        )


def _answer(request: cli.Request, expanded) -> None:
    from convbert_jax.training import environment

    environment.prepare_platform("cpu")  # the runs, which are processes, use the accelerators
    folder, explorer = request.folder, None
    if request.sweep.search and (request.action in ("run", "submit") or folder.journal.exists()):
        from convbert_jax.sweeps.search import Explorer

        explorer = Explorer(request.sweep, folder, request.overrides)
    sweep, expanded = _current(request, explorer, expanded)
    new, gone = runs.check_unchanged(expanded, folder)
    if request.action in ("run", "submit"):
        runs.check_files(expanded, folder)
    if request.action == "submit":
        _submit(request, len(expanded))
        return
    if request.action == "plan":
        print(runs.describe(sweep, expanded, folder, request.topology, request.price))
        return
    failed = {}
    if request.action == "run":
        from convbert_jax.sweeps import runner

        if gone:
            _log(f"Not in the sweep any more, kept and ignored: {', '.join(gone)}")
        if 0 < new < len(expanded):
            _log(f"{new} of {len(expanded)} runs are new.")
        metrics = results.choose_metrics(sweep, expanded[0].config)
        summary = runner.work(expanded, folder, log=_log, metrics=metrics, explorer=explorer)
        if summary.stopped:
            console.fail("stopped. The same command resumes the sweep.", code=130)
        failed = summary.failed
        sweep, expanded = _current(request, explorer, expanded)
    from convbert_jax.analysis import sweep_report

    for run, why in failed.items():
        _log(f"failed: {run}: {why}")
    with folder.alone("report"):  # workers finish at the same time
        outcome = results.collect(request.name, sweep, expanded, folder)
        report = sweep_report.write(outcome, folder.report)
    print(f"\n{report}\nReport: {folder.report}", flush=True)
    if failed:
        console.fail(f"{len(failed)} of {len(expanded)} runs failed. Start again to retry them.")


def _current(request: cli.Request, explorer, expanded):
    """The sweep and its runs, with the variants of the search so far."""
    if explorer is None:
        return request.sweep, expanded
    return explorer.sweep, runs.expand(explorer.sweep, request.folder, request.overrides)


def _submit(request: cli.Request, count: int) -> None:
    command = (str(pathlib.Path(__file__).resolve()), *request.arguments)
    worker = cli.Worker(command, str(pathlib.Path.cwd()))
    name = f"sweep-{request.name}"
    jobs = cli.submit(name, request.folder, worker, request.workers, request.sbatch)
    print(
        f"Submitted {len(jobs)} workers for {count} runs: job {jobs[0].partition('_')[0]}. Output: "
        f"{request.folder.path / 'slurm'}/JOB_0_log.out. Progress: --report."
    )


def _log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
