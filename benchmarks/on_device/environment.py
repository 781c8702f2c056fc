"""Machine description, and kernel errors against XLA and against float64 on the CPU."""

import functools
import importlib.metadata
import secrets
import shutil
import subprocess
import sys

from benchmarks.on_device.schedule import Results

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "libtpu", "jax-cuda12-plugin")
PACKAGES += ("jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "torch")
PACKAGES += ("transformers", "triton")
DRIVER = ("name", "driver_version", "memory.total", "power.limit", "clocks.max.sm")


def describe(results: Results, job: str, rehearse: bool) -> None:
    """Writes versions, device and driver."""
    import jax

    from convbert_jax.analysis import flops

    found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    device = jax.devices()[0]
    results.write(
        job,
        "figures",
        packages=found,
        device_kind=device.device_kind,
        runtime=device.client.platform_version.replace("\n", " "),
        bytes_limit=(device.memory_stats() or {}).get("bytes_limit"),
        peak_flops_by_table=flops.peak_flops(device.device_kind),
    )
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(DRIVER)}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        values = said.stdout.splitlines()[0].split(", ")
        results.write(job, "figures", driver=dict(zip(DRIVER, values, strict=True)))


def check_kernels(results: Results, job: str, rehearse: bool) -> None:
    """Writes the errors of every kernel on new random numbers; continues if a kernel fails.

    Args:
      job: "kernels gpu" or "kernels tpu".
    """
    import jax.numpy as jnp

    for dtype in ("float32",) if rehearse else ("bfloat16", "float32"):
        for name, function, definitions, arguments in _calls(
            job.split()[1], jnp.dtype(dtype), rehearse
        ):
            for against, (definition, exact) in definitions.items():
                seed = secrets.randbits(30)
                fields = {"kernel": name, "dtype": dtype, "against": against, "seed": seed}
                try:
                    errors = _measure(function, definition, arguments, seed, exact)
                    worst = max(errors, key=errors.get)
                    fields |= {"error": errors[worst], "in": worst, "errors": errors}
                except Exception as error:
                    fields |= {"error": f"{type(error).__name__}: {error}"[:300]}
                results.write(job, "figures", **fields)


def _measure(function, definition, arguments, seed, exact):
    from convbert_jax.ops import verification

    return verification.measure_errors(function, definition, arguments, {}, seed=seed, exact=exact)


def _calls(platform: str, dtype, rehearse: bool):
    """Yields cases (name, kernel, {"xla" or "float64": (definition, dtype)}, arguments)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from convbert_jax.ops import attention, gpu, reference, tpu, xla

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    kernels = {"gpu": gpu, "tpu": tpu}[platform]
    more = {"interpret": True} if rehearse else {}
    # rows, length, heads, width, taps, dilation, causal
    cases = {"uneven": (3, 130, 3, 48, 4, 2, False)}
    if dtype == jnp.bfloat16:
        cases = {"base": (2, 512, 6, 64, 9, 1, False), "31 taps": (2, 70, 2, 16, 31, 1, True)}
    if rehearse:
        cases = {"tiny": (2, 20, 2, 16, 3, 1, False)}
    for case, (rows, length, heads, width, count, dilation, causal) in cases.items():
        ids = jax.ShapeDtypeStruct((rows, length), np.int32)
        channels, offsets = heads * width, xla.tap_offsets(count, dilation=dilation, causal=causal)
        x, wide = array(rows, length, channels), array(rows, length, heads, width)
        calls = {
            "dynamic_conv": (wide, array(rows, length, heads, count), ids, offsets),
            "depthwise_conv": (x, array(count, channels), ids, offsets),
            "span_dynamic_conv": (
                *(x, x, x, array(channels, heads * count), array(heads * count)),
                *(ids, heads, offsets),
            ),
        }
        for op, arguments in calls.items():
            kernel = functools.partial(getattr(kernels, op), **more)
            definitions = {
                "xla": (getattr(xla, op), jnp.float32),
                "float64": (getattr(reference, op), np.float64),
            }
            yield f"{op}, {case}", kernel, definitions, arguments
        arguments = ((wide,) * 3) + (ids, ids, causal, 0)
        for name, one in attention.IMPLEMENTATIONS.items():
            if rehearse or one.platform != platform or one.refuses(*arguments):
                continue
            definitions = {"xla": (attention.xla, jnp.float32), "float64": (_attention, np.float64)}
            yield f"attention by {name}, {case}", one.function, definitions, arguments


def _attention(query, key, value, ids, key_ids, causal, window):
    import jax
    import jax.numpy as jnp

    from convbert_jax.ops.attention import visible_pairs

    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * query.shape[-1] ** -0.5
    seen = visible_pairs(query, key, ids, key_ids, causal, window)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)
