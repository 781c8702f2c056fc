"""Cost of a prompt and of each decoded token of a language model, by the TPU compiler's model.

    python -m benchmarks.layers.written_tokens --target=tpu:v5e --rows 1 32
    python -m benchmarks.layers.written_tokens --target=tpu:v5e --rows 32 --beam=4 --steps=31

A pre-norm decoder in bfloat16 with float32 parameters and windows of 7; needs no TPU. The columns
are in thousand cycles, with Pallas kernels as their traffic at full bandwidth:

- `prompt`: prefill of `--given` tokens.
- `token`: one of `--steps` greedily decoded tokens, in a loop with capacity for all. The rest of a
  search is not included. With --beam it is a step of the whole beam search without sorts, for
  which the compiler has no price (they are listed).
- `packing`: removal of cache entries that no beam uses.
- `floor`: traffic to read the parameters (bfloat16) and the cache once per token.
- `saved`: cost of the prompt token by token, divided by `prompt`.
"""

import argparse
import contextlib
from unittest import mock

from benchmarks import timing
from benchmarks.speed.pytorch_models import MIXERS, WORDS, make_language_model
from convbert_jax.analysis import tpu_devices, tpu_pricing
from convbert_jax.decoding.state import FIRST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=timing.TARGETS[:-3])
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512, help="channels; heads have 64")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="batch sizes")
    parser.add_argument("--given", type=int, default=448, help="prompt tokens")
    parser.add_argument("--steps", type=int, default=64, help="decoded tokens")
    parser.add_argument("--beam", type=int, default=1, help="beam size")
    options = parser.parse_args()
    entries = options.beam * (options.steps + 1)
    if options.beam > 1 and entries > FIRST:
        parser.error(
            f"--beam={options.beam} --steps={options.steps} needs {entries} cache entries; the "
            f"capacity without packing is {FIRST}. Use at most "
            f"--steps={FIRST // options.beam - 1}."
        )
    timing.use(options.target)
    print(f"{options.layers} layers of {options.width}, {WORDS:,} words, {options.target}")
    columns = ("prompt", "token", "floor", "token / floor", "saved", "packing")
    table = timing.Table("mixer", "rows", *columns)
    for mixer in options.mixers:
        for rows in options.rows:
            prompt, token, floor, packing = (
                cycles / 1e3 for cycles in measure(mixer, rows, options)
            )
            saved = (options.given - 1) * token / prompt
            table.add(mixer, rows, prompt, token, floor, token / floor, saved, packing)


def measure(mixer: str, rows: int, options: argparse.Namespace) -> tuple[float, ...]:
    """Returns the cycles of the prompt and a token, the floor of a token, and cycles of packing."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from convbert_jax.decoding import generation
    from convbert_jax.decoding import state as states

    made = {}

    def parameters():
        made["graph"], params = make_language_model(mixer, options.layers, options.width)
        return params

    params = jax.eval_shape(parameters)
    length = options.given + options.steps
    prompt = jax.ShapeDtypeStruct((rows, options.given), jnp.int32)

    def begin(params, prompt):
        model = nnx.merge(made["graph"], params)
        return model.start(prompt, copies=options.beam, length=length, dtype=jnp.bfloat16)

    def write(params, tokens, state, read):
        model = nnx.merge(made["graph"], params)

        def one(number, carry):
            place = options.given - 1 + number
            logits, state = model.step(carry[0], carry[1], place, read, jnp.bfloat16)
            return logits.argmax(-1).astype(jnp.int32), state

        return jax.lax.fori_loop(0, options.steps, one, (tokens, state))[0]

    def search(params, prompt, state, read):
        model = nnx.merge(made["graph"], params)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read, jnp.bfloat16)

        with _as_many_steps(options.steps):
            return generation.search(step, state, prompt, beam=options.beam, length=length, end=2)

    state, read = jax.eval_shape(begin, params, prompt)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    of_prompt = _cycles(options.target, begin, params, prompt)
    if options.beam > 1:
        of_tokens = _cycles(options.target, search, params, prompt, state, read)
        packs = any(map(_has_pack, jax.tree.leaves(state, is_leaf=_has_pack)))
        of_packing = _cycles(options.target, states.pack, state) if packs else 0.0
    else:
        of_tokens = _cycles(options.target, write, params, tokens, state, read)
        of_packing = 0.0
    least = sum(2 * leaf.size for leaf in jax.tree.leaves(params))
    least += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    floor = tpu_devices.chip(options.target).bandwidth_cycles(least)
    return of_prompt, of_tokens / options.steps, floor, of_packing


def _has_pack(part) -> bool:
    return hasattr(part, "pack")


@contextlib.contextmanager
def _as_many_steps(count: int):
    """Sets the price of data-dependent loops to `count` iterations.

    The compiled program of a search does not define when it ends.
    """
    import jax

    def loop(_, body, carry):
        return jax.lax.fori_loop(0, count, lambda _, carry: body(carry), carry)

    with mock.patch.object(jax.lax, "while_loop", loop):
        yield


def _cycles(target: str, function, *arguments) -> float:
    from convbert_jax.analysis.hlo import kernel_traffic

    compiled = tpu_pricing.compile_for(function, *arguments, target=target)
    found = tpu_pricing.price_compiled(compiled, target, kernels=False)
    if found.unpriced:
        print(f"without an estimate: {', '.join(found.unpriced)}", flush=True)
    traffic = kernel_traffic(compiled.as_text())
    return found.cycles + tpu_devices.chip(target).bandwidth_cycles(traffic)


if __name__ == "__main__":
    main()
