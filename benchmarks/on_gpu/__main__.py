"""All measurements for a quarter of an hour with a GPU, in order of value.

    python -m benchmarks.on_gpu --minutes=13
    python -m benchmarks.on_gpu --minutes=5 --smoke   # a rehearsal: tiny shapes on a CPU

    environment, kernels   versions; every kernel against XLA and float64, on new random numbers
    step                   steps of small and base, without autotuning; each with its profile
    pytorch, compiled      the same shapes in PyTorch; torch.compile runs during the steps
    step … autotuned       the same steps with XLA's autotuning, as time permits
    pretrain               pre-training of small in the remaining time, with checkpoints

Each job is a process with a time limit. Results are appended to FOLDER/results.jsonl at once. A
second call skips finished jobs and continues the pre-training. FOLDER/archives has the results and
the pre-trained weights in at most 8 files of 15 MB. `cat large.tar.gz.* | tar xz` unpacks the
weights as a run folder without optimizer state.

A machine without network that has jax for CUDA, flax, optax, orbax-checkpoint, PyTorch and
transformers lacks the packages of benchmarks/on_gpu/wheels.txt. The first command downloads them
on another machine into the folder .wheels, which git ignores; the second installs them:

    pip download --no-deps --only-binary=:all: --python-version=3.12 \\
        --platform=manylinux_2_28_x86_64 --platform=manylinux2014_x86_64 \\
        --dest=.wheels --requirement=benchmarks/on_gpu/wheels.txt
    pip install --no-index --no-deps --find-links=.wheels --requirement=benchmarks/on_gpu/wheels.txt
"""

import argparse
import importlib
import importlib.util
import os
import pathlib
import sys
import time

from benchmarks.on_gpu import schedule
from benchmarks.on_gpu.schedule import Job, Results

# Autotuning measures many forms of every product, which takes most of the time.
QUICK = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
UNOPTIMIZED = "--xla_backend_optimization_level=0"  # a rehearsal mostly compiles
# First word of a job -> (module, function of (results, job, smoke)).
CHILDREN = {
    "environment": ("environment", "describe"),
    "kernels": ("environment", "check_kernels"),
    "step": ("steps", "measure"),
    "pytorch": ("pytorch", "measure"),
    "compiled": ("pytorch", "measure"),
}
PACKING = 20.0  # seconds
PRETRAINING = 200.0  # seconds reserved for it by less important jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=13.0, help="total time")
    parser.add_argument("--folder", type=pathlib.Path, default="runs/on_gpu", help="results folder")
    parser.add_argument("--data", type=pathlib.Path, help="folder of .txt files to pre-train on")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # runs this job in the current process
    options = parser.parse_args()
    results = Results(options.folder.absolute())
    if options.job:
        module, function = CHILDREN[options.job.split()[0]]
        run = getattr(importlib.import_module(f"benchmarks.on_gpu.{module}"), function)
        run(results, options.job, options.smoke)
        return
    if options.data and not options.data.is_dir():
        parser.error(f"--data: {options.data} is not a folder.")
    end = time.monotonic() + 60 * options.minutes - PACKING
    results.folder.mkdir(parents=True, exist_ok=True)
    jobs = list_jobs(results.folder, options.data, options.smoke)
    schedule.run(jobs, results, end, after_each=lambda: schedule.pack(results.folder, []))
    for path in schedule.pack(results.folder, list_weights(results.folder / "pretrain")):
        print(path, path.stat().st_size)


def list_jobs(folder: pathlib.Path, data: pathlib.Path | None, smoke: bool) -> list[Job]:
    """Returns all jobs in order of value, except that a background job starts early."""
    shared = {
        "JAX_PLATFORMS": "cpu" if smoke else "cuda,cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the device
    }
    flags = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMIZED if smoke else QUICK}".strip()
    quick = shared | {"XLA_FLAGS": flags}

    def child(name, seconds, environment=quick, **more):
        command = [sys.executable, "-m", "benchmarks.on_gpu", f"--job={name}", f"--folder={folder}"]
        command += ["--smoke"] * smoke
        return Job(name, command, seconds, environment=environment, **more)

    sizes = ("tiny",) if smoke else ("small", "base")
    pytorch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    names = [f"{size} {model}" for size in sizes for model in ("convbert", "bert")] * pytorch
    late = {"reserve": PRETRAINING}
    train = _pretraining(folder, data, smoke)
    on_cpu = quick | {"JAX_PLATFORMS": "cpu"}
    return [
        Job("prepare", [*train, "--mode=prepare"], 240, environment=on_cpu, background=True),
        child("environment", 40),
        child("kernels", 100),
        *(child(f"compiled {name}", 330, background=True) for name in names[::2] if not smoke),
        *(child(f"step {size}", 170, reserve=60) for size in sizes),
        *(child(f"pytorch {name}", 50, reserve=60) for name in names),
        *(child(f"step {size} default", 120, **late) for size in sizes),
        *(child(f"step {size} autotuned", 150, shared, **late) for size in sizes),
        Job("pretrain", train, 3600, environment=quick, alone=True, grace=30),
    ]


def _pretraining(folder: pathlib.Path, data: pathlib.Path | None, smoke: bool) -> list[str]:
    fields = {
        "data.source": f"text:{data.absolute()}/**/*.txt" if data else "docstrings",
        "tokenizer.vocab_size": 8_192,
        "model.attention_dropout": 0.0,  # required by cuDNN
        "train.steps": 20_000,
        "train.log_every": 50,
        "train.eval_every": 1_000,
        "checkpoint.every": 500,
    }
    if smoke:
        fields |= {"tokenizer.vocab_size": 512, "train.steps": 4, "train.batch_size": 4}
        fields |= {"checkpoint.every": 2, "train.eval_rows": 8}
    size = "tiny" if smoke else "small"
    command = [sys.executable, "-m", "convbert_jax.main", f"--config=configs/{size}.py"]
    command += [f"--workdir={folder / 'pretrain'}"]
    return command + [f"--config.{name}={value}" for name, value in fields.items()]


def list_weights(run: pathlib.Path) -> list[pathlib.Path]:
    """Returns the parts of a run folder for fine-tuning: no shards and no optimizer state."""
    steps = [path for path in run.glob("checkpoints/*") if path.name.isdigit()]
    if not steps:
        return []
    newest = max(steps, key=lambda path: int(path.name))
    found = [path for path in run.iterdir() if path.name not in ("checkpoints", "data")]
    return found + [path for path in newest.iterdir() if path.name != "opt_state"]


if __name__ == "__main__":
    main()
