"""Speed of our encoder and of Hugging Face's PyTorch ConvBertModel on the same CPU.

    python -m benchmarks.speed.cpu_vs_pytorch --threads 1 2
    python -m benchmarks.speed.cpu_vs_pytorch --sizes base --rounds 15 --json result.json
    python -m benchmarks.speed.cpu_vs_pytorch --dtype bfloat16

Both have the same weights and number of threads, no dropout, and alternate in one process after a
check that their outputs agree. --dtype bfloat16: float32 parameters and bfloat16 products, as with
config.compute_dtype and torch.autocast. Each number of threads is a separate process, because XLA
counts cores once. By default freed memory stays in the process, for both, as in training from the
command line; --memory asked returns it to the system, as in a program that loads a model. Prints
medians in milliseconds and PyTorch's time divided by ours; above 1 ours is faster. Needs torch and
transformers.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks import timing
from convbert_jax.machine import keep_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=sorted(SIZES))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--unroll", type=int, default=1, help="config.model.scan_unroll")
    here = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", nargs="+", type=int, default=[here], help="default: all cores")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    parser.add_argument("--memory", choices=("kept", "asked"), default="kept")
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()
    if len(arguments.threads) > 1:
        if arguments.json:
            parser.error("--json supports a single value of --threads")
        for count in arguments.threads:
            own = ["--threads", str(count)]
            command = [sys.executable, "-m", "benchmarks.speed.cpu_vs_pytorch", *sys.argv[1:], *own]
            subprocess.run(command, check=True)
        return

    if arguments.memory == "kept":
        keep_memory()
    timing.take_threads(arguments.threads[0])
    os.environ["JAX_PLATFORMS"] = "cpu"
    results = [compare(size, arguments) for size in arguments.sizes]
    shape = f"{arguments.batch} x {arguments.length}"
    print(f"batch {shape}, {arguments.dtype}, {timing.describe_processor()}")
    print(f"{'':30}{'ours, ms':>10}{'PyTorch, ms':>13}{'ratio':>8}{'of pairs':>16}")
    for size, rows in zip(arguments.sizes, results, strict=True):
        for name, row in rows.items():
            print(
                f"{size + ', ' + name:30}{row['ours_ms']:10.1f}{row['pytorch_ms']:13.1f}"
                f"{row['ratio']:8.2f}{row['low']:9.2f}-{row['high']:.2f}"
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            rows = dict(zip(arguments.sizes, results, strict=True))
            json.dump(vars(arguments) | {"results": rows}, file)


# Tolerances of outputs with magnitude of about 1.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.3}
SIZES = {
    "small": dict(hidden_size=256, embedding_size=128, heads=4, ffn_size=1024),
    "base": dict(hidden_size=768, embedding_size=768, heads=12, ffn_size=3072),
}


def compare(size: str, arguments: argparse.Namespace) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers
    from flax import nnx

    from convbert_jax.config import Config
    from convbert_jax.models.embeddings import Embeddings
    from convbert_jax.models.encoder import Encoder
    from tests.parity.pytorch_weights import read

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
    default = Config()
    model = dataclasses.replace(
        default.model,
        **SIZES[size],
        layers=arguments.layers,
        mask_convolution=False,
        scan_unroll=arguments.unroll,
    )
    config = dataclasses.replace(default, model=model)
    torch.manual_seed(0)
    theirs = transformers.ConvBertModel(
        transformers.ConvBertConfig(
            vocab_size=config.tokenizer.vocab_size,
            embedding_size=model.embedding_size,
            num_hidden_layers=model.layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.heads,
            intermediate_size=model.ffn_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).eval()
    named = {name: p.detach().numpy().copy() for name, p in theirs.named_parameters()}
    params = read(model.layers, named)

    def build():
        starts, rngs = jax.nn.initializers.zeros, nnx.Rngs(0)
        return nnx.Dict(
            embeddings=Embeddings(config.embeddings, starts, rngs),
            encoder=Encoder(config.encoder, rngs),
        )

    graphdef = nnx.graphdef(nnx.eval_shape(build))
    dtype = jnp.dtype(arguments.dtype)
    shape = (arguments.batch, arguments.length)
    tokens = np.random.default_rng(0).integers(5, config.tokenizer.vocab_size, shape)
    ids, types = jnp.ones(shape, jnp.int32), jnp.zeros(shape, jnp.int32)

    def encode(params, tokens):
        parts = nnx.merge(graphdef, params)
        embedded = parts["embeddings"](tokens, ids, types, dtype=dtype)
        return parts["encoder"](embedded, ids).astype(jnp.float32)

    # A nested jit would merge the stored activations of all layers.
    forward = jax.jit(encode)
    gradient = jax.jit(
        jax.value_and_grad(lambda params, tokens: jnp.square(encode(params, tokens)).mean())
    )
    ours_tokens, their_tokens = jnp.asarray(tokens), torch.tensor(tokens)
    mask = torch.ones(shape, dtype=torch.int64)

    def their_output():
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
            return theirs(their_tokens, attention_mask=mask).last_hidden_state.float()

    def their_forward():
        with torch.no_grad():
            return their_output()

    def their_gradient():
        theirs.zero_grad(set_to_none=True)
        their_output().square().mean().backward()

    difference = np.abs(forward(params, ours_tokens) - their_forward().numpy()).max()
    if difference > TOLERANCES[arguments.dtype]:
        raise SystemExit(f"{size}: outputs differ by {difference:.1e}; timings are invalid.")
    return {
        "forward": race(
            lambda: jax.block_until_ready(forward(params, ours_tokens)),
            their_forward,
            arguments.rounds,
        ),
        "forward and backward": race(
            lambda: jax.block_until_ready(gradient(params, ours_tokens)),
            their_gradient,
            arguments.rounds,
        ),
    }


def race(ours: Callable, theirs: Callable, rounds: int) -> dict[str, float]:
    """Returns medians of alternating runs; `ratio` is the median of PyTorch / ours over pairs."""

    def clock(run):
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)

    clock(ours), clock(theirs)  # compile, warm up
    pairs = [(clock(ours), clock(theirs)) for _ in range(rounds)]
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    return {
        "ours_ms": statistics.median(a for a, _ in pairs),
        "pytorch_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
    }


if __name__ == "__main__":
    main()
