"""Sweeps: one training run for each variant and seed, and a report that compares the variants.

table.py    `Sweep`, `Variant`, `Task` and `Search`, as configs/ablation.py writes them, and
            `Folder`: one record, log and lock for each run
runs.py     expands a sweep into runs, checks all of them before the first starts, and describes
            their parameters, FLOPs, time and cost
runner.py   worker: runs each unfinished run as a process
child.py    that process
search.py   further variants, chosen by Optuna
results.py  metrics of finished runs, collected for analysis/sweep_report
cli.py      command line of launch/sweep.py, and workers as Slurm jobs (submitit)

A run is a command line of main.py, which resumes, locks and validates.
"""

from convbert_jax.sweeps.table import Search, Sweep, SweepError, Task, Variant

__all__ = ["Search", "Sweep", "SweepError", "Task", "Variant"]
