"""The first hour on a TPU: checks, kernels, steps and exact resumption, in order of value.

    python -m benchmarks.on_tpu                          # one v5e host, of 1, 4 or 8 chips
    python -m benchmarks.on_tpu --minutes=6 --rehearse   # tiny shapes on a CPU

    doctor, environment    checks of --mode=doctor; versions
    kernels, tests         every kernel against XLA and float64; tests with the marker tpu
    plan, layers predicted the compiler's times of the steps and layers below, on the host
    step                   steps of small, base and modern:150m; each with its profile
    resume                 `small` trained twice, once with a SIGTERM and a resumption
    layers                 layers of base, on one chip

calibration.json has measured relative to predicted times. benchmarks/on_device/session.py describes
the other results and a second call. A step has equally many rows per chip on each host. Without
libtpu, a rehearsal makes no plan and no prediction.
"""

import argparse
import importlib.util
import pathlib
import sys

from benchmarks.on_device import session, steps, tpu
from benchmarks.on_device.schedule import Job
from convbert_jax import machine
from convbert_jax.analysis import tpu_devices

# Config, rows per chip, length and variant of a step.
STEPS = (
    ("small", 128, 128, "default"),
    ("base", 256, 128, "microbatches"),
    ("base", 64, 512, "microbatches"),
    ("modern:150m", 16, 1_024, "default"),
)
LAYERS = ("64x128", "16x512")  # rows x length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chips = max(1, len(machine.find_accelerators().chips))
    here = tpu_devices.expand_name(f"v5e-{chips}")
    parser.add_argument("--minutes", type=float, default=60.0, help="total time")
    parser.add_argument("--folder", type=pathlib.Path, default="runs/on_tpu", help="results folder")
    parser.add_argument("--topology", default=here, help="this slice; default: all chips, as v5e")
    session.run(parser, list_jobs, report=tpu.write_calibration)


def list_jobs(options: argparse.Namespace) -> list[Job]:
    """Returns all jobs in order of value. A process that uses the chips holds all of them."""
    made = session.make_session(options, "tpu,cpu")
    child, rehearse, folder = made.child, options.rehearse, options.folder
    chips = tpu_devices.count_chips(options.topology)
    kind = options.topology.partition(":")[0]
    size = "tiny" if rehearse else "small"
    shapes = (("tiny", 4, 16, "default"),) if rehearse else STEPS
    layers = LAYERS[:1] if rehearse else LAYERS
    names = [f"{name} {rows * chips}x{length} {how}" for name, rows, length, how in shapes]

    def plan(name):
        config, fields = steps.read_job(f"step {name}", rehearse)
        output = folder / "plans" / f"{name.replace(' ', '_')}.json"
        flags = ("--mode=plan", f"--topology={options.topology}", f"--output={output}")
        command = session.main_command(config, fields, *flags, f"--workdir={folder}/plan")
        return Job(f"plan {name}", command, 1_500, environment=made.on_cpu, background=True)

    predictions = [plan(name) for name in names]
    predictions += [
        child(f"layers {shape} {tpu.PREDICTED} {kind}", 1_500, made.on_cpu, background=True)
        for shape in layers
    ]
    if importlib.util.find_spec("libtpu") is None:
        print("libtpu is not installed: no plan and no prediction is made.", flush=True)
        predictions = []
    measured = [child(f"step {name}", 700) for name in names]
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "tpu", "tests/ops"]
    on_tpu = {**made.environment, "CONVBERT_TEST_PLATFORM": "cpu" if rehearse else "tpu"}
    doctor = session.main_command(size, {}, "--mode=doctor", f"--workdir={folder}/doctor")
    return [
        Job("doctor", doctor, 120, environment=made.environment),
        child("environment", 60),
        *predictions,
        child("kernels tpu", 300),
        *measured[:2],
        child(f"resume {size}", 900),
        *measured[2:],
        *(child(f"layers {shape}", 400) for shape in layers),
        Job("tests", tests, 600, environment=on_tpu),
    ]


if __name__ == "__main__":
    main()
