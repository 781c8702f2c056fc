"""Layers on a TPU, exact resumption there, and measured times relative to the compiler's."""

import argparse
import json
import signal

from benchmarks import timing
from benchmarks.layers import layer
from benchmarks.layers.ops import DIRECTIONS, with_direction
from benchmarks.on_device import session, steps
from benchmarks.on_device.schedule import Results
from convbert_jax.analysis import tpu_devices

LAYERS = ("attention", "attention, best attention", "convbert, xla", "convbert, auto")
LAYERS += ("convbert, auto, best attention",)
RESUMED = 6_000  # steps; about three minutes of `small` on one v5e by the compiler's model
PREDICTED = "predicted"  # word of a job that estimates another


def measure_layers(results: Results, job: str, rehearse: bool) -> None:
    """Writes the milliseconds of layers of `base` forward and backward, on one device.

    Args:
      job: "layers ROWSxLENGTH", or "layers ROWSxLENGTH predicted KIND" for the estimate of the
        compiler for a kind of TPU, as in `tpu_pricing.price`.
    """
    _, shape, *predicted = job.split()  # predicted: [PREDICTED, kind]
    batch, length = (2, 128) if rehearse else map(int, shape.split("x"))
    target = f"tpu:{predicted[1]}" if predicted else "cpu" if rehearse else "tpu"
    timing.use(target)
    options = argparse.Namespace(
        config="tiny" if rehearse else "base", dtype="bfloat16", layers=0, unroll=1
    )
    programs = {}
    for name in LAYERS[:1] if rehearse else LAYERS:
        run, shapes = layer.build(layer.LAYERS[name], options, batch, length)
        programs[name] = with_direction(run, DIRECTIONS[1], 2), (shapes[0], *shapes)
    costs = timing.measure(programs, target)
    scale = 1e6 / tpu_devices.chip(target).clock if predicted else 1.0
    times = {name: cost.value and scale * cost.value for name, cost in costs.items()}
    results.write(job, "figures", ms=times, notes={name: cost.note for name, cost in costs.items()})


def check_resume(results: Results, job: str, rehearse: bool) -> None:
    """Trains twice, once with a SIGTERM midway and a resumption, and writes both losses.

    Args:
      job: "resume CONFIG".

    Raises:
      ResumeError: parameters, optimizer state or data position differ in any bit.
    """
    from convbert_jax.analysis import verify_resume
    from convbert_jax.training.metrics_writer import read_metrics
    from convbert_jax.workdir import Workdir

    _, config = job.split()
    fields = {"data.source": "docstrings", "tokenizer.vocab_size": 8_192}
    if rehearse:
        fields |= steps.REHEARSAL | {"train.eval_rows": 8}
    flags = session.main_command(config, fields)[3:]
    workdir = Workdir(results.folder / "resume")
    count = 16 if rehearse else RESUMED
    sentence = verify_resume.run(flags, workdir.path, steps=count, number=signal.SIGTERM)
    straight, killed = (
        {
            line["step"]: line["loss"]
            for line in read_metrics(workdir.trial(name).metrics)
            if line["split"] == "validation"
        }
        for name in ("straight", "killed")
    )
    results.write(
        job,
        "figures",
        result=sentence,
        losses_are_equal=straight == killed,
        validation_losses={step: [loss, killed.get(step)] for step, loss in straight.items()},
    )


def write_calibration(results: Results) -> None:
    """Prints measured times relative to the compiler's, and writes FOLDER/calibration.json.

    The file has "measured_ms", "predicted_ms" and their "ratio" of each step and layer. A plan of a
    step predicts a best and a worst case, an estimate of a layer one time.
    """
    measured, predicted = {}, {}
    for line in results.read():
        if line["kind"] == "figures" and "ms" in line:
            name, _, kind = line["job"].partition(f" {PREDICTED} ")
            times = line["ms"] if isinstance(line["ms"], dict) else {"": line["ms"]}
            for part, ms in times.items():
                (predicted if kind else measured)[f"{name} {part}".strip()] = [ms] if kind else ms
    for path in results.folder.glob("plans/*.json"):
        plan = json.loads(path.read_text(encoding="utf-8"))
        times = [1e3 * seconds for seconds in plan.get("seconds_of_a_step", ())]
        predicted[f"step {path.stem.replace('_', ' ')}"] = times
    found = {
        name: {
            "measured_ms": measured[name],
            "predicted_ms": times,
            "ratio": [measured[name] / each for each in times],
        }
        for name, times in predicted.items()
        if measured.get(name) and all(times)
    }
    text = json.dumps(found, indent=2)
    (results.folder / "calibration.json").write_text(text + "\n", encoding="utf-8")
    table = timing.Table("work", "measured, ms", "predicted, ms", "measured / predicted")
    for name, row in found.items():
        spelled = (" to ".join(f"{n:.3g}" for n in row[key]) for key in ("predicted_ms", "ratio"))
        table.add(name, row["measured_ms"], *spelled)
