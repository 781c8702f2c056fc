"""All measurements for a quarter of an hour with a GPU, in order of value.

    python -m benchmarks.on_gpu --minutes=13
    python -m benchmarks.on_gpu --minutes=5 --rehearse   # tiny shapes on a CPU

    environment, kernels   versions; every kernel against XLA and float64, on new random numbers
    step                   steps of small, base and two sizes of configs/modern.py, without
                           autotuning; each with its profile
    pytorch, compiled      small and base in PyTorch; torch.compile runs during the steps
    step … autotuned       steps of small and base with XLA's autotuning, as time permits
    babylm                 configs/babylm.py:strict_small in the remaining time, with checkpoints:
                           replaced tokens, then masked words

benchmarks/on_device/session.py describes the results and a second call. BabyLM's text is not
included: --data=FOLDER. Without it, the runs read docstrings.

A machine without network that has jax for CUDA, flax, optax, orbax-checkpoint, PyTorch and
transformers lacks the packages of benchmarks/on_device/wheels.txt. The first command downloads them
on another machine into the folder .wheels, which git ignores; the second installs them:

    pip download --no-deps --only-binary=:all: --python-version=3.12 \\
        --platform=manylinux_2_28_x86_64 --platform=manylinux2014_x86_64 \\
        --dest=.wheels --requirement=benchmarks/on_device/wheels.txt
    pip install --no-index --no-deps --find-links=.wheels \\
        --requirement=benchmarks/on_device/wheels.txt
"""

import argparse
import importlib.util
import os
import pathlib

from benchmarks.on_device import session, steps
from benchmarks.on_device.schedule import Job

# Autotuning measures many forms of every product, which takes most of the time.
QUICK = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
MODERN = ("modern:17m 64x1024", "modern:150m 32x1024")
OBJECTIVES = ("rtd", "mlm")
PRETRAINING = 200.0  # seconds reserved for it by less important jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=13.0, help="total time")
    parser.add_argument("--folder", type=pathlib.Path, default="runs/on_gpu", help="results folder")
    parser.add_argument("--data", type=_folder, help="folder of .txt files to pre-train on")
    session.run(parser, list_jobs, runs=[f"babylm_{name}" for name in OBJECTIVES])


def _folder(text: str) -> pathlib.Path:
    if not pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return pathlib.Path(text).absolute()


def list_jobs(options: argparse.Namespace) -> list[Job]:
    """Returns all jobs in order of value, except that a background job starts early."""
    # Several processes share the device.
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    made = session.make_session(options, "cuda,cpu", QUICK, **memory)
    child, rehearse = made.child, options.rehearse
    tuned = made.environment | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    sizes, modern = (("tiny",), ("modern:tiny",)) if rehearse else (("small", "base"), MODERN)
    pytorch = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
    names = [f"{size} {model}" for size in sizes for model in ("convbert", "bert")] * pytorch
    late = {"reserve": PRETRAINING}
    babylm = {name: _babylm(made, options.data, name) for name in OBJECTIVES}
    prepare = [*babylm[OBJECTIVES[0]], "--mode=prepare"]
    return [
        Job("prepare", prepare, 240, environment=made.on_cpu, background=True),
        child("environment", 40),
        child("kernels gpu", 100),
        *(child(f"compiled {name}", 330, background=True) for name in names[::2] if not rehearse),
        *(child(f"step {size}", 170, reserve=60) for size in sizes),
        *(child(f"step {size}", 120, **late) for size in modern),
        *(child(f"pytorch {name}", 50, reserve=60) for name in names),
        *(child(f"step {size} default", 120, **late) for size in sizes),
        *(child(f"step {size} autotuned", 150, tuned, **late) for size in sizes),
        *(
            Job(f"babylm {name}", train, 3600, environment=made.environment, alone=True, grace=30)
            for name, train in babylm.items()
        ),
    ]


def _babylm(made: session.Session, data: pathlib.Path | None, objective: str) -> list[str]:
    fields = {
        "data.source": "docstrings",
        "data.directory": made.folder / "text",
        "model.attention_dropout": 0.0,  # required by cuDNN
        "train.log_every": 50,
    }
    if made.rehearse:
        fields |= steps.REHEARSAL | {"train.steps": 4, "train.eval_rows": 8}
        fields |= {"checkpoint.every": 2, "checkpoint.huggingface_every": 0}
    if data:
        fields["data.source"] = f"text:{data}/**/*.txt"
    config = f"configs/babylm.py:strict_small,{objective}"
    return session.main_command(config, fields, f"--workdir={made.folder}/babylm_{objective}")


if __name__ == "__main__":
    main()
