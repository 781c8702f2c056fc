"""Speed of our networks and of transformers' PyTorch classes on the same CPU.

    python -m benchmarks.speed.vs_pytorch encoder --threads 1 2
    python -m benchmarks.speed.vs_pytorch encoder --sizes base --dtype bfloat16 --unroll 12
    python -m benchmarks.speed.vs_pytorch translation --lengths 16 64 128 --rounds 5
    python -m benchmarks.speed.vs_pytorch language_model --rows 1 8 --given 224 --length 256

- encoder: forward, and forward with gradients, of ConvBertModel.
- translation: a training step with AdamW and beam search of Marian's class, post-norm, `tiny`.
- language_model: greedy decoding of GPT-2's class; each text has --given tokens and is continued.

Both sides have the same shape and number of threads, no dropout, and alternate in one process. The
encoders and the Transformers have the same weights, and their outputs are compared first; light
and dynamic mixers have the shape only. Decoded texts have equal lengths, so that all do the same
work. --dtype bfloat16: float32 parameters and bfloat16 products, as with config.compute_dtype and
torch.autocast. Each number of threads is a separate process, because XLA counts cores once. Freed
memory stays in the process, for both, as in training from the command line; --memory asked returns
it to the system, as in a program that loads a model. Prints medians in milliseconds and PyTorch's
time divided by ours over consecutive pairs of runs; above 1 ours is faster. Needs torch and
transformers.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable

from benchmarks import timing
from benchmarks.speed.pytorch_models import END, MIXERS, PAD, SIZES, START, WORDS
from convbert_jax.machine import keep_memory

# Tolerances of outputs with magnitude of about 1.
TOLERANCES = {"float32": 1e-4, "bfloat16": 0.3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=COMPARISONS)
    parser.add_argument("--threads", nargs="+", type=int, default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each")
    parser.add_argument("--memory", choices=("kept", "asked"), default="kept")
    encoder = parser.add_argument_group("encoder")
    encoder.add_argument("--sizes", nargs="+", default=["small", "base"], choices=SIZES)
    encoder.add_argument("--dtype", choices=TOLERANCES, default="float32")
    encoder.add_argument("--unroll", type=int, default=1, help="config.model.scan_unroll")
    both = parser.add_argument_group("encoder and language_model")
    both.add_argument("--layers", type=int, help="default: 12; language_model: 6")
    both.add_argument("--width", type=int, default=512, help="channels (language_model)")
    both.add_argument("--rows", type=int, nargs="+", help="rows; default: 8; 64; 1 and 8")
    both.add_argument("--length", type=int, help="tokens of a row; default: 128; 24; 64")
    both.add_argument("--given", type=int, default=1, help="prompt tokens (language_model)")
    search = parser.add_argument_group("translation")
    search.add_argument("--texts", type=int, default=32, help="batch size of decoding")
    search.add_argument("--beam", type=int, default=4)
    search.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128], help="decoded")
    arguments = parser.parse_args()
    if len(arguments.threads) > 1:
        for count in arguments.threads:
            command = [sys.executable, "-m", "benchmarks.speed.vs_pytorch", *sys.argv[1:]]
            subprocess.run([*command, "--threads", str(count)], check=True)
        return
    compare, layers, rows, length = COMPARISONS[arguments.what]
    arguments.layers = arguments.layers or layers
    arguments.rows = arguments.rows or rows
    arguments.length = arguments.length or length
    if arguments.memory == "kept":
        keep_memory()
    timing.take_threads(arguments.threads[0])
    timing.use("cpu")
    import torch

    torch.set_num_threads(arguments.threads[0])
    print(f"{arguments.what}, {arguments.dtype}, {timing.describe_processor()}")
    table = timing.Table("work", "model", "PyTorch, ms", "ours, ms", "PyTorch / ours")
    for work, ours, theirs in compare(arguments):
        times = timing.alternate({**ours, "theirs": theirs}, arguments.rounds)
        baseline = times.pop("theirs")
        for name, found in times.items():
            medians = statistics.median(baseline), statistics.median(found)
            table.add(work, name, *medians, timing.describe_ratios(found, baseline))


def check(name: str, ours, theirs, tolerance: float) -> None:
    """Exits if outputs differ."""
    import numpy as np

    difference = np.abs(np.asarray(ours) - theirs.detach().numpy()).max()
    if difference > tolerance:
        raise SystemExit(f"{name}: outputs differ by {difference:.1e}; timings are invalid.")


# --- Comparisons: (work, ours by name, theirs) ---


def compare_encoders(arguments: argparse.Namespace):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch

    from benchmarks.speed.pytorch_models import make_encoders

    dtype = jnp.dtype(arguments.dtype)
    for size in arguments.sizes:
        encode, params, theirs, words = make_encoders(size, arguments.layers, arguments.unroll)
        tokens = np.random.default_rng(0).integers(5, words, (arguments.rows[0], arguments.length))
        run = functools.partial(encode, dtype=dtype)
        # A nested jit would merge the stored activations of all layers.
        forward = jax.jit(run)
        gradient = jax.jit(
            jax.value_and_grad(
                lambda params, tokens, run=run: jnp.square(run(params, tokens)).mean()
            )
        )
        given, their_tokens = jnp.asarray(tokens), torch.tensor(tokens)

        def their_output(theirs=theirs, tokens=their_tokens):
            with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bfloat16"):
                found = theirs(tokens, attention_mask=torch.ones_like(tokens))
                return found.last_hidden_state.float()

        def their_gradient(theirs=theirs, output=their_output):
            theirs.zero_grad(set_to_none=True)
            output().square().mean().backward()

        check(size, forward(params, given), their_output(), TOLERANCES[arguments.dtype])
        for work, ours, other in (
            ("forward", forward, torch.no_grad()(their_output)),
            ("forward and backward", gradient, their_gradient),
        ):
            mine = functools.partial(_wait, ours, params, given)
            yield work, {size: mine}, other


def _wait(function, *arguments):
    import jax

    return jax.block_until_ready(function(*arguments))


def compare_translation(arguments: argparse.Namespace):
    import jax.numpy as jnp
    import numpy as np
    import torch

    from benchmarks.speed.pytorch_models import make_marian, make_translation, run_translation

    rng = np.random.default_rng(0)
    shape = (arguments.rows[0], arguments.length)
    source, target = (rng.integers(5, WORDS, shape) for _ in range(2))
    theirs = make_marian(max(*arguments.lengths, *shape) + 2)
    ours = {mixer: make_translation(mixer, theirs) for mixer in MIXERS}

    def their_logits():
        # Marian prepends its start token to the labels; here the target is the decoder's input.
        found = theirs.model(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)
        ).last_hidden_state
        return theirs.lm_head(found)

    logits = run_translation(*ours["attention"], jnp.asarray(source), jnp.asarray(target))
    check("logits", logits, their_logits(), 1e-3)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-9)
    labels = torch.tensor(target)

    def their_step():
        optimizer.zero_grad(set_to_none=True)
        logits = their_logits()
        torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1)).backward()
        optimizer.step()

    steps = {mixer: make_step(*made, source, target) for mixer, made in ours.items()}
    yield f"training step, {2 * source.size:,} tokens", steps, their_step
    texts = source[: arguments.texts]
    for length in arguments.lengths:
        options = {"num_beams": arguments.beam, "length_penalty": 1.0, "early_stopping": True}
        theirs_of = functools.partial(_generate, theirs, texts, length, **options)
        runs = {
            mixer: make_search(*made, texts, length, arguments.beam) for mixer, made in ours.items()
        }
        yield f"{len(texts)} texts of {length}, beam {arguments.beam}", runs, theirs_of


def compare_language_models(arguments: argparse.Namespace):
    import jax.numpy as jnp
    import numpy as np
    import torch
    from flax import nnx

    from benchmarks.speed.pytorch_models import make_gpt2, make_language_model

    ours = {m: make_language_model(m, arguments.layers, arguments.width) for m in MIXERS}
    theirs = make_gpt2(ours["attention"][1], arguments.layers, arguments.width, arguments.length)
    tokens = np.random.default_rng(0).integers(5, WORDS, (4, arguments.length))
    graph, params = ours["attention"]
    logits = nnx.merge(graph, params)(jnp.asarray(tokens), jnp.ones(tokens.shape, int))
    check("logits", logits, theirs(torch.tensor(tokens)).logits, 1e-3)
    for rows in arguments.rows:
        begun = np.random.default_rng(1).integers(5, WORDS, (rows, arguments.given))
        runs = {mixer: make_writer(*made, begun, arguments.length) for mixer, made in ours.items()}
        mask = torch.ones(begun.shape, dtype=torch.long)
        options = {"attention_mask": mask, "do_sample": False}
        write = functools.partial(_generate, theirs, begun, arguments.length, **options)
        yield f"{rows} x {arguments.length} tokens, {arguments.given} given", runs, write


COMPARISONS = {  # and their default layers, rows and length
    "encoder": (compare_encoders, 12, [8], 128),
    "translation": (compare_translation, None, [64], 24),
    "language_model": (compare_language_models, 6, [1, 8], 64),
}


def _generate(model, tokens, length: int, **options):
    """Writes texts of exactly `length` tokens in PyTorch."""
    import torch

    with torch.no_grad():
        found = model.generate(
            torch.tensor(tokens), min_length=length, max_length=length, **options
        )
    assert found.shape == (len(tokens), length)


# --- Our programs ---


def make_step(graph, params, source, target) -> Callable:
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.speed.pytorch_models import run_translation
    from convbert_jax.objectives.cross_entropy import cross_entropy

    source, target = jnp.asarray(source), jnp.asarray(target)
    optimizer = optax.adamw(1e-9)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        def loss(params):
            return cross_entropy(run_translation(graph, params, source, target), target).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    kept = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def one():
        kept[:] = jax.block_until_ready(step(*kept))

    return one


def make_search(graph, params, source, length: int, beam: int) -> Callable:
    """Returns a beam search whose texts end at exactly `length` tokens."""
    import jax.numpy as jnp

    from convbert_jax.decoding import search

    source = jnp.asarray(source)
    prompt = jnp.full((len(source), 1), START)

    def start(model):
        return model.start(source, jnp.ones_like(source), copies=beam, length=length)

    # END only at the last position, where nothing else may be chosen
    options = {"beam": beam, "length": length, "end": END, "pad": PAD, "never": (END,)}
    return _make_decoder(graph, params, start, functools.partial(search, **options), prompt, length)


def make_writer(graph, params, begun, length: int) -> Callable:
    """Returns a greedy decoder whose texts end at exactly `length` tokens."""
    import jax.numpy as jnp

    from convbert_jax.decoding import greedy

    begun = jnp.asarray(begun)

    def start(model):
        return model.start(begun, copies=1, length=length)

    options = {"length": length, "end": END, "pad": PAD, "never": (END,)}
    return _make_decoder(graph, params, start, functools.partial(greedy, **options), begun, length)


def _make_decoder(graph, params, start, decode, prompt, length: int) -> Callable:
    import jax
    from flax import nnx

    @jax.jit
    def run(params, prompt):
        model = nnx.merge(graph, params)
        state, read = start(model)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        return decode(step, state, prompt)

    assert (run(params, prompt).lengths == length).all()
    return functools.partial(_wait, run, params, prompt)


if __name__ == "__main__":
    main()
