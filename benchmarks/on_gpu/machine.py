"""What the machine is, and what it can do at best."""

import importlib.metadata
import platform
import shutil
import subprocess

from benchmarks import timing
from benchmarks.on_gpu import clock
from benchmarks.on_gpu.session import Session

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "jax-cuda12-plugin", "jax-cuda13-plugin")
PACKAGES += ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch", "transformers", "triton")
# What the driver says: keys of a line -> names that nvidia-smi has for them.
DRIVER = {"name": "name", "driver": "driver_version", "memory": "memory.total"}
DRIVER |= {"power_limit": "power.limit", "most_sm_clock": "clocks.max.sm"}


def versions(session: Session, part: str, smoke: bool) -> None:
    session.plan(["packages", "device", "driver"])
    session.run("packages", _packages)
    session.run("device", _device)
    session.run("driver", _driver)


def _packages() -> dict:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _device() -> dict:
    import jax

    from convbert_jax.analysis import flops

    device = jax.devices()[0]
    memory = (device.memory_stats() or {}).get("bytes_limit")
    return {
        "platform": device.platform,
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "compute_capability": getattr(device, "compute_capability", None),
        "bytes_for_jax": memory,
        "runtime": device.client.platform_version.replace("\n", " "),
        "peak_flops_by_table": flops.peak_flops(device.device_kind),
    }


def _driver() -> dict:
    if not shutil.which("nvidia-smi"):
        return {"note": "there is no nvidia-smi here"}
    query = ",".join(DRIVER.values())
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    values = first.stdout.splitlines()[0].split(", ")
    # `name` is that of the line
    return {"gpu" if k == "name" else k: v for k, v in zip(DRIVER, values, strict=True)}


def ceilings(session: Session, part: str, smoke: bool) -> None:
    import jax.numpy as jnp

    large, small = (1 << 16, 1 << 14) if smoke else (1 << 30, 24 << 20)
    width = 64 if smoke else 8192
    cases = {
        f"copy, {_size(size)}, {dtype.__name__}": lambda size=size, dtype=dtype: {
            "gb_per_s": clock.copy_bandwidth(size, dtype) / 1e9
        }
        for size in (large, small)  # the small one is as large as an array of section op
        for dtype in (jnp.bfloat16, jnp.float32)
    }
    for dtype in (jnp.bfloat16, jnp.float32):
        cases[f"product, {width} x {width} x {width}, {dtype.__name__}"] = lambda dtype=dtype: (
            _product(width, dtype)
        )
    cases["launch of an empty program"] = _launch
    session.plan(cases)
    for name, measure in cases.items():
        session.run(name, measure)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def _product(width: int, dtype) -> dict:
    import jax

    keys = jax.random.split(jax.random.key(0), 2)
    a, b = (jax.random.normal(key, (width, width)).astype(dtype) for key in keys)
    scale = width**-0.5  # so that repeated products stay as large as they are
    milliseconds = clock.repeated(lambda a, b: a @ b, (a, (b * scale).astype(dtype)), "first")
    return {"tflop_per_s": 2 * width**3 / (milliseconds / 1e3) / 1e12, "ms": milliseconds}


def _launch() -> dict:
    import statistics

    import jax
    import jax.numpy as jnp

    x = jnp.zeros(8)
    run = jax.jit(lambda x: x + 1)
    times = timing.alternate({"": lambda: jax.block_until_ready(run(x))}, 50)[""]
    return {"ms": statistics.median(times)}
