"""Many runs as one table: rows of config differences x seeds, each pair a run in its own folder.

table.py    what a sweep is: `Sweep`, `Row`, `Task`, as configs/ablation.py writes them
cells.py    the runs that it makes, each with its config, checked as a whole
checks/     what cannot be, whose fault it is, and what is not there
request.py  what a command line of launch/sweep.py asks for
folder.py   where everything of a sweep is, and what it keeps of each cell
journal.py  studies of Optuna in a file that runners share
queue.py    who does what, among them
search.py   rows that Optuna chooses, under a budget
runner.py   one runner: takes a cell, starts it as a process, keeps what came out
child.py    that process
slurm/      many runners, as jobs of a cluster
describe.py the cells as a text; parameters and FLOPs
results.py  what came out, for analysis/sweep_report

A cell is a command line of main.py: all that a run can do (resume, locks, refusals) it does by
itself. launch/sweep.py prints; nothing here does.
"""

from convbert_jax.sweeps.table import Row, Search, Sweep, SweepError, Task

__all__ = ["Row", "Search", "Sweep", "SweepError", "Task"]
