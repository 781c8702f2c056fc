"""Runs a table of runs: rows of config differences x seeds, each cell once, with a report.

    python launch/sweep.py --config=configs/ablation.py:kernel_size --plan
    python launch/sweep.py --config=configs/ablation.py:kernel_size --workdir=runs/kernel_size

The same command goes on where it was stopped. Several of them at once, on machines that share the
folder, share the work. What the table, the folder and the report mean: docs/sweeps.md.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from convbert_jax import console
from convbert_jax.config import UserError
from convbert_jax.sweeps import cells as cells_lib
from convbert_jax.sweeps import request as request_lib


def main() -> None:
    console.set_up_logging()
    try:
        request = request_lib.read(sys.argv, __doc__)
        cells = cells_lib.expand(request.sweep, request.folder, request.overrides)
        cells_lib.check_unchanged(cells, request.folder)
    except UserError as error:
        console.fail(str(error), code=2)
    from convbert_jax.sweeps import describe
    from convbert_jax.training.environment import devices

    devices.prepare_platform("cpu")  # accelerators are for the cells, which are processes
    if request.do == "plan":
        print(describe.describe(request.sweep, cells, request.folder))
        return


if __name__ == "__main__":
    main()
