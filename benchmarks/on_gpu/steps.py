"""Pre-training steps of this package, and a profile of one."""

import pathlib
import statistics
import tempfile
import time
from collections import Counter

import convbert_jax
from benchmarks.on_gpu.schedule import Results

# name -> overrides of configs/small.py or base.py with unrolled layers. cuDNN attention has no
# dropout.
VARIANTS = {"": {"model.attention_dropout": 0.0}, "default": {}}
SMOKE = {"model.layers": 1, "data.length": 16, "train.batch_size": 4, "tokenizer.vocab_size": 512}
ROUNDS, IN_A_ROW = 5, 4  # steps between host synchronizations, as in a run
KERNELS = 20  # lines of a profile
LEAST_ROWS = 8


def read_config(size: str, smoke: bool, variant: str = ""):
    return convbert_jax.load_config(size, **VARIANTS[variant], **(SMOKE if smoke else {}))


def measure(results: Results, job: str, smoke: bool) -> None:
    """Writes the speed of a step, then its profile.

    Args:
      job: "step SIZE[ VARIANT][ autotuned]".
    """
    _, size, *rest = job.split()
    config = read_config(size, smoke, "default" if "default" in rest else "")
    while True:
        try:
            return _measure(results, job, config)
        except Exception as error:
            rows = config.train.batch_size // 2
            if "RESOURCE_EXHAUSTED" not in str(error) or rows < LEAST_ROWS:
                raise
            config = convbert_jax.load_config(size, **{"train.batch_size": rows})


def _measure(results: Results, job: str, config) -> None:
    import jax

    from convbert_jax.analysis import flops
    from convbert_jax.recipes import planning
    from convbert_jax.training.partitioning import make_mesh
    from convbert_jax.training.train_step import make_program

    device = jax.devices()[0]
    mesh = make_mesh(config.mesh, [device])
    started = time.perf_counter()
    with jax.set_mesh(mesh):
        program = make_program(planning.make_task(config, device), config, mesh)
        shapes = planning.make_batch(config)
        step = program.train_step.lower(program.abstract, shapes).compile()
        state = program.init(jax.random.key(config.seed))
        compiled = time.perf_counter() - started
        batch = program.put_batch(_draw(config, shapes))

        def run(count):
            nonlocal state
            started = time.perf_counter()
            for _ in range(count):
                state, _, vitals = step(state, batch)
            jax.block_until_ready((state, vitals))
            return (time.perf_counter() - started) / count

        with results.timing():
            run(1)
            seconds = statistics.median(run(IN_A_ROW) for _ in range(ROUNDS))
            rows, length = config.train.batch_size, config.data.length
            rate, peak = rows * length / seconds, flops.peak_flops(device.device_kind)
            results.write(
                job,
                "figures",
                tokens_per_s=rate,
                ms=1e3 * seconds,
                mfu=flops.training_flops_per_token(config) * rate / peak if peak else None,
                batch=rows,
                length=length,
                most_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
                seconds_to_compile=compiled,
            )
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    run(1)
                results.write(job, "profile", **read_profile(pathlib.Path(folder)))


def _draw(config, shapes) -> dict:
    """Draws rows of random words, one document each, without padding."""
    import numpy as np

    batch = {name: np.zeros(shape.shape, np.int32) for name, shape in shapes.items()}
    words = np.random.default_rng(0).integers(5, config.tokenizer.vocab_size, batch["tokens"].shape)
    return batch | {"tokens": words.astype(np.int32), "segment_ids": batch["segment_ids"] + 1}


def read_profile(folder: pathlib.Path) -> dict:
    """Returns the slowest kernels of a trace: [name, calls, microseconds, share].

    Kernels are the events of a GPU's streams; on a CPU the events of XLA's operations.
    """
    from jax.profiler import ProfileData

    (path,) = folder.rglob("*.xplane.pb")
    planes = list(ProfileData.from_file(str(path)).planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    lines = [line for plane in devices or planes for line in plane.lines]
    streams = [line for line in lines if line.name.startswith("Stream")]
    calls, times = Counter(), Counter()
    for line in streams or lines:
        for event in line.events:
            if devices or "hlo_op" in dict(event.stats):
                calls[event.name] += 1
                times[event.name] += event.duration_ns / 1e3
    total = sum(times.values())
    kernels = [
        [name[:160], calls[name], round(spent, 1), round(spent / total, 4)]
        for name, spent in times.most_common(KERNELS)
    ]
    return {"kernels": kernels, "us": total, "calls": calls.total(), "names": len(calls)}
