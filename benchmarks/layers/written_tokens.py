"""What a prompt, and each token after it, costs a language model on a TPU, by the TPU compiler's
model; needs no TPU.

    python -m benchmarks.layers.written_tokens --target=tpu:v5e --rows 1 32

A decoder of pre-norm in bfloat16 from float32 parameters, windows of 7. `prompt`: `--given` tokens
read at once. `token`: one of `--steps` tokens, of which each is the most probable one behind the
one before, in a loop with room for all of them; what a search does besides is not in it. Thousand
cycles, Pallas kernels as their traffic at full bandwidth. The floor of a token is what of it has to
be read once: parameters in bfloat16 and the state. `saved` is what the same prompt costs token by
token, divided by `prompt`.
"""

import argparse

from benchmarks.speed.beside_pytorch import MIXERS, WORDS
from benchmarks.speed.language_models_vs_pytorch import make_ours
from convbert_jax.analysis.tpu import chips
from convbert_jax.analysis.tpu import pricing as tpu_pricing

TARGETS = ("tpu:v5e", "tpu:v5p", "tpu:v6e")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="tpu:v5e", choices=TARGETS)
    parser.add_argument("--mixers", nargs="+", default=MIXERS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512, help="channels; heads have 64")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32], help="written together")
    parser.add_argument("--given", type=int, default=448, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=64, help="tokens written")
    options = parser.parse_args()
    tpu_pricing.use_compile_only_tpu()
    print(f"{options.layers} layers of {options.width}, {WORDS:,} words, {options.target}")
    names = f"{'prompt':>10}{'token':>9}{'floor':>9}{'token / floor':>15}{'saved':>7}"
    print(f"{'':12}{'rows':>5}{names}")
    for mixer in options.mixers:
        for rows in options.rows:
            print(show(mixer, rows, *measure(mixer, rows, options), options.given), flush=True)


def measure(mixer: str, rows: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Cycles of the prompt, of a token, and the floor of a token."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    made = {}

    def parameters():
        made["graph"], params = make_ours(mixer, options)
        return params

    params = jax.eval_shape(parameters)
    length = options.given + options.steps
    prompt = jax.ShapeDtypeStruct((rows, options.given), jnp.int32)

    def begin(params, prompt):
        model = nnx.merge(made["graph"], params)
        return model.start(prompt, copies=1, length=length, dtype=jnp.bfloat16)

    def write(params, tokens, state, read):
        model = nnx.merge(made["graph"], params)

        def one(number, carry):
            place = options.given - 1 + number
            logits, state = model.step(carry[0], carry[1], place, read, jnp.bfloat16)
            return logits.argmax(-1).astype(jnp.int32), state

        return jax.lax.fori_loop(0, options.steps, one, (tokens, state))[0]

    state, read = jax.eval_shape(begin, params, prompt)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    of_prompt = _cycles(options.target, begin, params, prompt)
    of_tokens = _cycles(options.target, write, params, tokens, state, read)
    least = sum(2 * leaf.size for leaf in jax.tree.leaves(params))
    least += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    floor = chips.chip(options.target).bandwidth_cycles(least)
    return of_prompt, of_tokens / options.steps, floor


def _cycles(target: str, function, *arguments) -> float:
    from convbert_jax.analysis.tpu.program import kernel_traffic

    compiled = tpu_pricing.compile_for(function, *arguments, target=target)
    found = tpu_pricing.price_compiled(compiled, target, kernels=False)
    if found.unpriced:
        print(f"without an estimate: {', '.join(found.unpriced)}", flush=True)
    traffic = kernel_traffic(compiled.as_text())
    return found.cycles + chips.chip(target).bandwidth_cycles(traffic)


def show(mixer: str, rows: int, prompt: float, token: float, floor: float, given: int) -> str:
    saved = (given - 1) * token / prompt
    return (
        f"{mixer:12}{rows:5}{prompt / 1e3:10.1f}{token / 1e3:9.1f}{floor / 1e3:9.1f}"
        f"{token / floor:15.2f}{saved:7.1f}"
    )


if __name__ == "__main__":
    main()
