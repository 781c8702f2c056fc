"""All that a first hour with a GPU must answer, in one call of at most nine minutes.

    python -m benchmarks.on_gpu --json gpu.jsonl
    python -m benchmarks.on_gpu --sections numerics,op --limit 120
    python -m benchmarks.on_gpu --smoke

Sections, in this order:

    versions   what is installed, and on which device
    ceilings   bandwidth of a copy and peak of a product, as measured
    numerics   the kernels of ops/gpu, and cuDNN's attention, against float64 on the CPU
    op         each convolution by XLA and by its kernel, as a share of the bandwidth of a copy
    layer      ConvBERT's layer against one of attention, with XLA's and with cuDNN's attention
    step       whole pre-training steps of small and base in the variants that matter
    pytorch    Hugging Face's ConvBERT and BERT, forward and backward

Each runs in processes of its own: what fails, hangs or breaks the device takes nothing else along.
The parts of `numerics` and `pytorch` compile at the same time, as many as there are cores for, and
are timed one after the other, while nothing compiles; those of `step` come one after the other, as
XLA measures products on the device while it compiles them.
A section that is not through at its limit is ended, and what it did not come to is named; lines are
in the file as soon as they are known (`session.py` has their keys). Programs are kept compiled for
one call, or where JAX_COMPILATION_CACHE_DIR says. `--smoke` is all of it at tiny shapes on a CPU,
kernels in Pallas' interpreter: its figures say only that this program runs.
"""

import argparse
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.on_gpu import pytorch, session, steps

# name -> (module, function of (session, part, smoke), parts or function of smoke that names them,
# seconds by default). Parts have processes of their own and share the limit; what a section leaves
# of its seconds, later ones may take.
SECTIONS = {
    "versions": ("machine", "versions", ("",), 10),
    "ceilings": ("machine", "ceilings", ("",), 25),
    "numerics": (
        "numerics",
        "check",
        ("dynamic_conv", "span_dynamic_conv", "depthwise_conv", "attention"),
        130,
    ),
    "op": ("speed", "ops", ("",), 70),
    "layer": ("speed", "layers", ("",), 55),
    "step": ("steps", "run", steps.parts, 150),
    "pytorch": ("pytorch", "run", pytorch.parts, 85),
}
IN_TURN = ("step",)  # whose parts do not run together
CALL, MOST = 525, 180  # seconds of all sections by default, and of one
UNOPTIMIZED = "--xla_backend_optimization_level=0"
NEEDED = ("jax", "jaxlib", "flax", "optax", "numpy", "jaxtyping", "ml_collections")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sections", default=",".join(SECTIONS), help="with commas between; default: all"
    )
    parser.add_argument(
        "--limit", type=float, help="seconds of each section; default: all fit into nine minutes"
    )
    parser.add_argument("--json", help="file for the lines, which must not be there yet")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # of the one section: run it here
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    chosen = options.sections.split(",")
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"--sections: there is no {name!r}, but {', '.join(SECTIONS)}.")
    if options.limit is not None and options.limit <= 0:
        parser.error(f"--limit is {options.limit:g}, but must be above 0.")
    os.environ["JAX_PLATFORMS"] = "cpu" if options.smoke else "cuda,cpu"
    if options.smoke:  # which compiles much and runs little
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMIZED}".strip()
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    if options.part is not None:
        _run_here(chosen[0], options)
        return
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        sys.exit(f"Not installed: {', '.join(missing)}; pip install -r requirements.txt.")
    if options.json and os.path.exists(options.json):
        parser.error(f"--json: {options.json} is there already; name another file.")
    with tempfile.TemporaryDirectory() as folder:
        path = options.json or os.path.join(folder, "lines")
        with open(path, "w", encoding="utf-8"):
            pass  # a file that cannot be written fails before anything runs
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(folder, "programs"))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        if not options.smoke:
            _find_gpu()
        for what in _missing("pytorch" in chosen, options.smoke):
            print(f"Missing here: {what}.", flush=True)
        end, ordered = time.time() + CALL, [name for name in SECTIONS if name in chosen]
        for place, name in enumerate(ordered):
            rest = sum(SECTIONS[later][-1] for later in ordered[place:])
            share = (end - time.time()) * SECTIONS[name][-1] / rest
            _run_section(name, options.limit or min(MOST, share), options.smoke, path)


def _find_gpu() -> None:
    """Exits unless jax finds an NVIDIA GPU. In a process of its own, which holds no memory then."""
    code = "import jax; d = jax.devices()[0]; print(d.platform)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode or found.stdout.split()[-1:] != ["gpu"]:
        said = (found.stderr.strip().splitlines() or found.stdout.split() or ["nothing"])[-1]
        sys.exit(
            f"benchmarks.on_gpu needs an NVIDIA GPU, but jax finds none ({said[:200]}); install "
            "jax for it (pip install 'jax[cuda12]'), or add --smoke to see this run on a CPU."
        )


def _missing(pytorch: bool, smoke: bool) -> list[str]:
    """What is not on this machine, and what follows."""
    found = []
    if not smoke and not shutil.which("nvidia-smi"):
        found.append("nvidia-smi, so nothing is known of the driver")
    absent = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if absent and pytorch:
        found.append(f"{' and '.join(absent)}, so section pytorch has nothing to run")
    elif pytorch and not smoke:
        code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
        if subprocess.run([sys.executable, "-c", code], capture_output=True).returncode:
            found.append("CUDA in torch, so section pytorch has nothing to run")
    return found


def _run_here(name: str, options: argparse.Namespace) -> None:
    """One part, in this process, which ends with status 1 where it fails as a whole."""
    module, function, *_ = SECTIONS[name]
    lines = session.Session(name, options.json, options.until, options.part)
    try:
        run = getattr(importlib.import_module(f"benchmarks.on_gpu.{module}"), function)
        run(lines, options.part, options.smoke)
    except Exception as error:
        lines.write("error", options.part or name, error=session.sentence(error))
        raise


def _run_section(name: str, limit: float, smoke: bool, path: str) -> None:
    _, _, parts, _ = SECTIONS[name]
    parts = parts(smoke) if callable(parts) else parts
    until = time.time() + limit
    count = 1 if name in IN_TURN else session.at_once()
    for first in range(0, len(parts), count):
        _run_together(name, parts[first : first + count], smoke, path, until)


def _run_together(name: str, parts: Sequence[str], smoke: bool, path: str, until: float) -> None:
    lines = session.Session(name, path, until)
    if not lines.has_time():
        for part in parts:
            lines.write("left_out", part or name, error="the time limit of the section is over")
        return
    start = os.path.getsize(path)
    running = {part: _start_part(name, part, smoke, path, until) for part in parts}
    try:
        for part, process in running.items():
            ended = _why_ended(process, until)
            missing = session.missing_cases(path, start, part)
            for case in missing:
                lines.write(
                    "left_out", case, error=ended or "the time limit of the section is over"
                )
                # Only the first was running.
                ended = ended and f"behind a case that failed: {ended}"[: session.LONGEST]
            if ended and not missing:
                lines.write("error", part or name, error=ended)
    finally:
        for process in running.values():
            _kill(process)


def _start_part(name: str, part: str, smoke: bool, path: str, until: float) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks.on_gpu", f"--sections={name}", f"--part={part}"]
    command += [f"--json={path}", f"--until={until}", *(["--smoke"] if smoke else [])]
    # None may take the whole memory of the device before the others come.
    room = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(command, start_new_session=True, env=os.environ | room)


def _why_ended(process: subprocess.Popen, until: float) -> str:
    """Why it ended as it should not, or ""."""
    try:
        code = process.wait(max(0, until - time.time()))
    except subprocess.TimeoutExpired:
        _kill(process)
        return "it was still running at the time limit and was ended"
    if code < 0:
        return f"its process ended by {signal.Signals(-code).name}"
    return f"its process ended with status {code}" if code else ""


def _kill(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
