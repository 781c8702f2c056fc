"""Pre-training steps of this package, and a profile of one."""

import pathlib
import re
import shutil
import statistics
import time
from collections import Counter
from typing import Any

import convbert_jax
from benchmarks.on_device.schedule import Results

# Last words of a job -> overrides of a config with unrolled layers. cuDNN attention has no dropout.
VARIANTS = {
    "": {"model.attention_dropout": 0.0},
    "default": {},
    "microbatches": {"train.accumulation": 4},
}
REHEARSAL = {
    "data.source": "text:docs/howto/*.md",
    "model.layers": 1,
    "data.length": 16,
    "train.batch_size": 4,
    "tokenizer.vocab_size": 512,
}
# Tokens per second on one H100: 2T tokens / (4 GPUs x hours), of Ettin's pre-training README.
ETTIN = {"modern:17m": 985e3, "modern:32m": 655e3, "modern:68m": 463e3, "modern:150m": 296e3}
ROUNDS, IN_A_ROW = 5, 4  # steps between host synchronizations, as in a run
KERNELS = 20  # lines of a profile
LEAST_ROWS = 8


def read_job(job: str, rehearse: bool) -> tuple[str, dict[str, Any]]:
    """Returns the config's name and the overrides of a job.

    Args:
      job: "step CONFIG[ ROWSxLENGTH][ VARIANT][ autotuned]".
    """
    _, name, *rest = job.split()
    fields = dict(VARIANTS[next((word for word in rest if word in VARIANTS), "")])
    for word in rest:
        if shape := re.fullmatch(r"(\d+)x(\d+)", word):
            fields |= {"train.batch_size": int(shape[1]), "data.length": int(shape[2])}
    return name, fields | (REHEARSAL if rehearse else {})


def read_config(job: str, rehearse: bool):
    name, fields = read_job(job, rehearse)
    return convbert_jax.load_config(name, **fields)


def measure(results: Results, job: str, rehearse: bool) -> None:
    """Writes the speed of a step on all devices, then its profile, which is also kept.

    Args:
      job: see `read_job`.
    """
    name, fields = read_job(job, rehearse)
    while True:
        config = convbert_jax.load_config(name, **fields)
        try:
            return _measure(results, job, config, ETTIN.get(name))
        except Exception as error:
            fields["train.batch_size"] = config.train.batch_size // 2
            least = fields["train.batch_size"] < LEAST_ROWS
            if "RESOURCE_EXHAUSTED" not in str(error) or least:
                raise


def _measure(results: Results, job: str, config, ettin: float | None) -> None:
    import jax

    from convbert_jax.analysis import flops
    from convbert_jax.recipes import planning
    from convbert_jax.training import environment
    from convbert_jax.training.memory import count_shards
    from convbert_jax.training.partitioning import make_mesh
    from convbert_jax.training.train_step import make_program

    device, *_ = devices = jax.devices()
    mesh = make_mesh(config.mesh, devices)
    shards = count_shards(mesh)
    started = time.perf_counter()
    with jax.set_mesh(mesh), environment.random_numbers(devices):
        program = make_program(planning.make_task(config, device, shards=shards), config, mesh)
        shapes = planning.make_batch(config, shards)
        batch = program.put_batch(_draw(config, shapes))
        step = program.train_step.lower(program.abstract, batch).compile()
        state = program.init(jax.random.key(config.seed))
        compiled = time.perf_counter() - started

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
            done = flops.training_flops_per_token(config) * rate / len(devices)
            results.write(
                job,
                "figures",
                tokens_per_s=rate,
                ms=1e3 * seconds,
                mfu=done / peak if peak else None,
                of_ettin=rate / ettin if ettin else None,
                batch=rows,
                length=length,
                devices=len(devices),
                device_kind=device.device_kind,
                most_bytes=(device.memory_stats() or {}).get("peak_bytes_in_use"),
                seconds_to_compile=compiled,
            )
            folder = results.folder / "profiles" / job.replace(" ", "_")
            shutil.rmtree(folder, ignore_errors=True)
            with jax.profiler.trace(str(folder)):
                run(1)
            results.write(job, "profile", **read_profile(folder))


def _draw(config, shapes) -> dict:
    """Draws rows of random words, one document each, without padding."""
    import numpy as np

    batch = {name: np.zeros(shape.shape, np.int32) for name, shape in shapes.items()}
    words = np.random.default_rng(0).integers(5, config.tokenizer.vocab_size, batch["tokens"].shape)
    return batch | {"tokens": words.astype(np.int32), "segment_ids": batch["segment_ids"] + 1}


def read_profile(folder: pathlib.Path) -> dict:
    """Returns the slowest kernels of a trace: [name, calls, microseconds, share].

    Kernels are the events of a GPU's streams or of the first TPU's operations; on a CPU the events
    of XLA's operations.
    """
    from jax.profiler import ProfileData

    (path,) = folder.rglob("*.xplane.pb")
    planes = list(ProfileData.from_file(str(path)).planes)
    kinds = ("/device:GPU", "/device:TPU")
    devices = sorted((p for p in planes if p.name.startswith(kinds)), key=lambda p: p.name)[:1]
    lines = [line for plane in devices or planes for line in plane.lines]
    streams = [line for line in lines if line.name.startswith(("Stream", "XLA Ops"))]
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
