"""Training and beam search of our encoder-decoders and transformers' Marian, on the same CPU.

    python -m benchmarks.speed.sequences_vs_pytorch
    python -m benchmarks.speed.sequences_vs_pytorch --lengths 16 64 --json result.json

All models have the same shape and alternate in one process with the same number of threads, in
float32 without dropout, with post-norm as in Marian. The two Transformers have the same weights,
and their logits are compared first. A training step is forward, backward and AdamW. Decoded texts
have equal lengths, so that all do the same work. Freed memory stays in the process, as in our
training; this speeds up PyTorch too. Prints medians in milliseconds, and PyTorch's time divided by
ours over consecutive pairs of runs; above 1 ours is faster. Needs torch and transformers.
"""

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable

from benchmarks.speed.beside_pytorch import END, MIXERS, PAD, START, WORDS, race, report
from convbert_jax.machine import keep_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64, help="rows per training step")
    parser.add_argument("--length", type=int, default=24, help="tokens of source and target")
    parser.add_argument("--texts", type=int, default=32, help="batch size of decoding")
    parser.add_argument("--beam", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 128], help="decoded")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each")
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()

    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_memory()
    report("tiny", compare(arguments), arguments)


def compare(arguments: argparse.Namespace) -> dict:
    import jax.numpy as jnp
    import numpy as np
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
    rng = np.random.default_rng(0)
    shape = (arguments.rows, arguments.length)
    source, target = (rng.integers(5, WORDS, shape) for _ in range(2))
    theirs = make_marian(max(*arguments.lengths, *shape) + 2)
    ours = {mixer: make_ours(mixer, theirs) for mixer in MIXERS}

    def their_logits():
        # Marian prepends its start token to the labels; here the target is the decoder's input.
        found = theirs.model(
            input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)
        ).last_hidden_state
        return theirs.lm_head(found)

    graph, params = ours["attention"]
    with torch.no_grad():
        expected = their_logits().numpy()
    difference = np.abs(run(graph, params, jnp.asarray(source), jnp.asarray(target)) - expected)
    if difference.max() > 1e-3:
        raise SystemExit(f"logits differ by {difference.max():.1e}; timings are invalid.")

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-9)
    labels = torch.tensor(target)

    def their_step():
        optimizer.zero_grad(set_to_none=True)
        logits = their_logits()
        torch.nn.functional.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1)).backward()
        optimizer.step()

    steps = {mixer: make_step(*made, source, target) for mixer, made in ours.items()}
    tokens = 2 * arguments.rows * arguments.length
    figures = {f"training step, {tokens} tokens": race(steps, their_step, arguments.rounds)}
    texts = source[: arguments.texts]
    for length in arguments.lengths:
        runs = {
            mixer: make_search(*made, texts, length, arguments.beam) for mixer, made in ours.items()
        }

        def their_search(length=length):
            with torch.no_grad():
                return theirs.generate(
                    torch.tensor(texts),
                    num_beams=arguments.beam,
                    min_length=length,
                    max_length=length,
                    length_penalty=1.0,
                    early_stopping=True,
                )

        assert their_search().shape == (len(texts), length)
        figures[f"{len(texts)} texts of {length}, beam {arguments.beam}"] = race(
            runs, their_search, arguments.rounds
        )
    return figures


def make_marian(positions: int):
    """Returns a Transformer with the shape of `tiny` and our sinusoids."""
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from configs.written import SIZES
    from convbert_jax.models.embeddings import sinusoids

    model, _ = SIZES["tiny"]("attention")
    torch.manual_seed(0)
    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {
            f"{side}_layers": model.layers,
            f"{side}_attention_heads": model.heads,
            f"{side}_ffn_dim": model.ffn_size,
        }
    config = transformers.MarianConfig(
        vocab_size=WORDS,
        d_model=model.hidden_size,
        activation_function="relu",
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        scale_embedding=True,
        max_position_embeddings=positions,
        pad_token_id=PAD,
        eos_token_id=END,
        forced_eos_token_id=END,
        decoder_start_token_id=START,
        bos_token_id=None,
        **sides,
    )
    made = transformers.MarianMTModel(config).eval()
    places = torch.tensor(np.asarray(sinusoids(jnp.arange(positions), model.hidden_size)))
    for side in (made.model.encoder, made.model.decoder):
        side.embed_positions.weight.data.copy_(places)
    return made


def make_ours(mixer: str, theirs):
    """Returns (static part, parameters) of `tiny`; the Transformer gets PyTorch's weights."""
    import jax
    from flax import nnx

    from configs.written import SIZES
    from convbert_jax.config.network import derive_encoder_decoder
    from convbert_jax.interop.fairseq import to_parameters
    from convbert_jax.models.networks import EncoderDecoder

    model, sequence = SIZES["tiny"](mixer)
    sequence = dataclasses.replace(sequence, norm="post")
    config = derive_encoder_decoder(model, sequence, WORDS, WORDS)
    model = EncoderDecoder(config, nnx.Rngs(0))
    graph, params = nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if mixer == "attention":
        named = {
            name.removeprefix("model."): value.detach().numpy()
            for name, value in theirs.state_dict().items()
            if "embed_positions" not in name and name not in ("final_logits_bias", "lm_head.weight")
        }
        word = named.pop("shared.weight")
        named |= {f"{side}.embed_tokens.weight": word for side in ("encoder", "decoder")}
        params = jax.tree.map(jax.numpy.asarray, to_parameters(named, config))
    return graph, params


def run(graph, params, source, target):
    import jax.numpy as jnp
    from flax import nnx

    ones = jnp.ones_like(source)
    return nnx.merge(graph, params)(source, ones, target, jnp.ones_like(target))


def make_step(graph, params, source, target) -> Callable:
    import jax
    import jax.numpy as jnp
    import optax

    from convbert_jax.objectives.cross_entropy import cross_entropy

    source, target = jnp.asarray(source), jnp.asarray(target)
    optimizer = optax.adamw(1e-9)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        def loss(params):
            return cross_entropy(run(graph, params, source, target), target).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    kept = [jax.tree.map(jnp.copy, params), optimizer.init(params)]

    def one():
        kept[:] = jax.block_until_ready(step(*kept))

    return one


def make_search(graph, params, source, length: int, beam: int) -> Callable:
    """Returns a beam search whose texts end at exactly `length` tokens."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from convbert_jax.decoding import search

    @jax.jit
    def find(params, source):
        model = nnx.merge(graph, params)
        state, read = model.start(source, jnp.ones_like(source), copies=beam, length=length)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        prompt = jnp.full((len(source), 1), START)
        return search(
            step, state, prompt, beam=beam, length=length, end=END, pad=PAD, never=(END,)
        )  # except at the last position, where only it may be chosen

    source = jnp.asarray(source)
    found = find(params, source)
    assert (found.lengths == length).all()
    return lambda: jax.block_until_ready(find(params, source))


if __name__ == "__main__":
    main()
