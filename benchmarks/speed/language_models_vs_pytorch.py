"""Greedy decoding with our language models and with transformers' GPT-2, on the same CPU.

    python -m benchmarks.speed.language_models_vs_pytorch
    python -m benchmarks.speed.language_models_vs_pytorch --rows 1 8 --given 224 --length 256

All models have the same shape and alternate in one process with the same number of threads, in
float32. The two Transformers have the same weights, and their logits are compared first. Each text
has `--given` tokens and is continued to `--length`. Prints medians in milliseconds, and PyTorch's
time divided by ours over consecutive pairs of runs; above 1 ours is faster. Needs torch and
transformers.
"""

import argparse
import os
from collections.abc import Callable

from benchmarks.speed.beside_pytorch import END, MIXERS, PAD, WORDS, race, report
from convbert_jax.machine import keep_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512, help="channels; heads have 64")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="batch sizes")
    parser.add_argument("--length", type=int, default=64, help="tokens per text")
    parser.add_argument("--given", type=int, default=1, help="prompt tokens, included in length")
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each")
    parser.add_argument("--json", help="file to write the figures to")
    arguments = parser.parse_args()

    os.environ["JAX_PLATFORMS"] = "cpu"
    keep_memory()
    title = f"{arguments.layers} layers of {arguments.width}"
    report(title, compare(arguments), arguments)


def compare(arguments: argparse.Namespace) -> dict:
    import jax.numpy as jnp
    import numpy as np
    import torch
    from flax import nnx

    torch.set_num_threads(len(os.sched_getaffinity(0)))  # as many as XLA uses
    ours = {mixer: make_ours(mixer, arguments) for mixer in MIXERS}
    theirs = make_gpt2(ours["attention"][1], arguments)
    tokens = np.random.default_rng(0).integers(5, WORDS, (4, arguments.length))
    graph, params = ours["attention"]
    found = nnx.merge(graph, params)(jnp.asarray(tokens), jnp.ones(tokens.shape, int))
    with torch.no_grad():
        difference = np.abs(found - theirs(torch.tensor(tokens)).logits.numpy()).max()
    if difference > 1e-3:
        raise SystemExit(f"logits differ by {difference:.1e}; timings are invalid.")
    figures = {}
    for rows in arguments.rows:
        begun = np.random.default_rng(1).integers(5, WORDS, (rows, arguments.given))
        runs = {mixer: make_writer(*made, begun, arguments.length) for mixer, made in ours.items()}

        def write(begun=begun):
            with torch.no_grad():
                return theirs.generate(
                    torch.tensor(begun),
                    attention_mask=torch.ones(begun.shape, dtype=torch.long),
                    do_sample=False,
                    min_length=arguments.length,
                    max_length=arguments.length,
                )

        assert write().shape == (rows, arguments.length)
        name = f"{rows} x {arguments.length} tokens, {arguments.given} given"
        figures[name] = race(runs, write, arguments.rounds)
    return figures


def make_ours(mixer: str, arguments: argparse.Namespace):
    """Returns (static part, parameters) of a pre-norm language model."""
    from flax import nnx

    import convbert_jax
    from convbert_jax.config.network import derive_language_model
    from convbert_jax.models.networks import LanguageModel

    config = convbert_jax.load_config(
        f"configs/language_model.py:tiny,{mixer}",
        **{
            "model.layers": arguments.layers,
            "model.hidden_size": arguments.width,
            "model.embedding_size": arguments.width,
            "model.ffn_size": 4 * arguments.width,
            "model.heads": arguments.width // 64,
            "model.kernel_sizes": () if mixer == "attention" else (7,) * arguments.layers,
        },
    )
    model = LanguageModel(derive_language_model(config.model, config.sequence, WORDS), nnx.Rngs(0))
    return nnx.graphdef(model), nnx.to_pure_dict(nnx.state(model, nnx.Param))


def make_gpt2(params, arguments: argparse.Namespace):
    """Returns GPT-2 with our weights and our sinusoids as its position table.

    Ours scales input embeddings by sqrt(C), but not the output projection, so GPT-2's two tables
    are not tied.
    """
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from convbert_jax.models.embeddings import sinusoids

    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS,
            n_positions=arguments.length,
            n_embd=arguments.width,
            n_layer=arguments.layers,
            n_head=arguments.width // 64,
            n_inner=4 * arguments.width,
            activation_function="relu",
            layer_norm_epsilon=1e-5,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    ).eval()
    word = np.asarray(params["target"]["word"]["embedding"])
    places = sinusoids(jnp.arange(arguments.length), arguments.width)
    named = {
        "transformer.wte.weight": word * arguments.width**0.5,
        "transformer.wpe.weight": places,
        "lm_head.weight": word,
        "transformer.ln_f.weight": params["decoder"]["norm"]["scale"],
        "transformer.ln_f.bias": params["decoder"]["norm"]["bias"],
    }
    stack = params["decoder"]["stages"]["0"]
    for n in range(arguments.layers):
        of_layer = f"transformer.h.{n}."
        mixer, inner = stack["mixer"], stack["feed_forward"]
        for kind, name in (("kernel", "weight"), ("bias", "bias")):
            three = [mixer[part][kind][n] for part in ("query", "key", "value")]
            named[f"{of_layer}attn.c_attn.{name}"] = np.concatenate(three, axis=-1)
            named[f"{of_layer}attn.c_proj.{name}"] = mixer["output"][kind][n]
            named[f"{of_layer}mlp.c_fc.{name}"] = inner["intermediate"][kind][n]
            named[f"{of_layer}mlp.c_proj.{name}"] = inner["output"][kind][n]
        for kind, name in (("scale", "weight"), ("bias", "bias")):
            named[f"{of_layer}ln_1.{name}"] = stack["mixer_norm"][kind][n]
            named[f"{of_layer}ln_2.{name}"] = stack["feed_forward_norm"][kind][n]
    made.load_state_dict({name: torch.tensor(np.asarray(value)) for name, value in named.items()})
    return made


def make_writer(graph, params, begun, length: int) -> Callable:
    """Returns a greedy decoder whose texts end at exactly `length` tokens."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from convbert_jax.decoding import greedy

    @jax.jit
    def write(params, begun):
        model = nnx.merge(graph, params)
        state, read = model.start(begun, copies=1, length=length)

        def step(tokens, state, place):
            return model.step(tokens, state, place, read)

        return greedy(step, state, begun, length=length, end=END, pad=PAD, never=(END,))

    begun = jnp.asarray(begun)
    assert (write(params, begun).lengths == length).all()
    return lambda: jax.block_until_ready(write(params, begun))


if __name__ == "__main__":
    main()
