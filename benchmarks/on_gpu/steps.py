"""Whole pre-training steps of small and base, in the variants that matter on a GPU."""

import contextlib
import statistics
import time

import convbert_jax
from benchmarks.on_gpu.session import Session

NO_DROPOUT = {"model.attention_dropout": 0.0}
CUDNN = {**NO_DROPOUT, "model.attention": "cudnn"}
XLA = {"model.convolution": "xla"}
RBG, GRADIENT = "rbg", "forward and backward"  # what no field of a config says
# Overrides of configs/base.py or small.py, whose computation is in bfloat16 on a GPU, with the
# kernels of ops/gpu, XLA's attention with its dropout and keys of threefry, layers unrolled.
VARIANTS = {
    "default": {},
    GRADIENT: {},  # without clipping and update: what section pytorch measures
    f"{GRADIENT}, cudnn": CUDNN,
    "xla, no attention dropout": {**NO_DROPOUT, "model.attention": "xla"},
    "cudnn, no attention dropout": CUDNN,
    "convolutions by xla": XLA,
    "cudnn, convolutions by xla": {**CUDNN, **XLA},
    "rbg": {},
    "scanned": {"model.scan_unroll": 1, "generator.scan_unroll": 1},
    "float32": {"compute_dtype": "float32"},
}
# The most telling first: the time may not do for all.
CASES = (
    ("base", "cudnn, no attention dropout"),
    ("small", "cudnn, no attention dropout"),
    ("base", "default"),
    ("base", f"{GRADIENT}, cudnn"),
    ("base", "cudnn, convolutions by xla"),
    ("base", "rbg"),
    ("base", "scanned"),
    ("small", "default"),
    ("small", "scanned"),
    ("base", GRADIENT),
    ("small", GRADIENT),
    ("base", "convolutions by xla"),
    ("small", "cudnn, convolutions by xla"),
    ("base", "xla, no attention dropout"),
    ("base", "float32"),
    ("small", "xla, no attention dropout"),
    ("small", "rbg"),
    ("small", "float32"),
)
SMOKED = (("tiny", "rbg"), ("tiny", GRADIENT))
SMOKE = {"model.layers": 1, "data.length": 16, "train.batch_size": 4}
SMOKE |= {"tokenizer.vocab_size": 512}
ROUNDS, IN_A_ROW = 5, 4  # steps before the host waits, as in a run
LEAST = 8  # rows


def parts(smoke: bool) -> list[str]:
    return [f"{size}, {variant}" for size, variant in (SMOKED if smoke else CASES)]


def run(session: Session, part: str, smoke: bool) -> None:
    size, variant = part.split(", ", 1)
    session.plan([part])
    session.run(part, lambda: _with_memory(session, size, variant, SMOKE if smoke else {}))


def _with_memory(session: Session, size: str, variant: str, overrides: dict) -> dict:
    """With the batch of the config, or half of it until it fits, which `batch` then says."""
    batch = convbert_jax.load_config(size, **overrides).train.batch_size
    while True:
        given = {**VARIANTS[variant], **overrides, "train.batch_size": batch}
        try:
            return _measure(session, convbert_jax.load_config(size, **given), variant)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or batch // 2 < LEAST:
                raise
            batch //= 2


def _measure(session: Session, config, variant: str) -> dict:
    import jax

    from convbert_jax.analysis import flops
    from convbert_jax.recipes.planning import traced
    from convbert_jax.training.program import make_program
    from convbert_jax.training.sharding import make_mesh

    device = jax.devices()[0]
    mesh = make_mesh(config.mesh, [device])
    numbers = jax.default_prng_impl("rbg") if RBG in variant else contextlib.nullcontext()
    started = time.perf_counter()
    with numbers, jax.set_mesh(mesh):
        task = traced.make_task(config, device)
        program = make_program(task, config, mesh)
        shapes = traced.make_batch(config)
        with session.compiling():
            prepare = _gradient if variant.startswith(GRADIENT) else _step
            step = prepare(program, task, shapes)
            key = jax.random.key(config.seed)
            start = program.init.lower(key).compile()
            compiled = time.perf_counter() - started
        with session.alone():
            state = start(key)
            batch = program.put_batch(_draw(config, shapes))
            state, loss = step(state, batch)
            seconds = []
            for _ in range(ROUNDS):
                jax.block_until_ready((state, loss))
                started = time.perf_counter()
                for _ in range(IN_A_ROW):
                    state, loss = step(state, batch)
                jax.block_until_ready((state, loss))
                seconds.append((time.perf_counter() - started) / IN_A_ROW)
            most = (device.memory_stats() or {}).get("peak_bytes_in_use")
    rows, length = config.train.batch_size, config.data.length
    rate = rows * length / statistics.median(seconds)
    peak = flops.peak_flops(device.device_kind)
    needed = flops.training_flops_per_token(config)
    return {
        "tokens_per_s": rate,
        "ms": 1e3 * statistics.median(seconds),
        "mfu": needed * rate / peak if peak else None,
        "batch": rows,
        "length": length,
        "flops_per_token": needed,
        "loss": float(loss),
        "most_bytes": most,
        "seconds_to_compile": compiled,
    }


def _draw(config, shapes) -> dict:
    """Rows of one document without padding, of random words."""
    import numpy as np

    batch = {name: np.zeros(shape.shape, np.int32) for name, shape in shapes.items()}
    words = np.random.default_rng(0).integers(5, config.tokenizer.vocab_size, batch["tokens"].shape)
    return batch | {"tokens": words.astype(np.int32), "segment_ids": batch["segment_ids"] + 1}


def _step(program, task, shapes):
    compiled = program.train_step.lower(program.abstract, shapes).compile()

    def step(state, batch):
        state, _, vitals = compiled(state, batch)
        return state, vitals.loss

    return step


def _gradient(program, task, shapes):
    """Loss and gradients of the parameters as they are; every one is computed and kept."""
    import jax

    both = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    key = jax.random.key(0)
    compiled = both.lower(program.abstract.params, shapes, key).compile()
    kept = []

    def step(state, batch):
        if not kept:
            kept.append(state.params)
        (loss, _), gradients = compiled(kept[0], batch, key)
        return gradients, loss

    return step
