"""Largest difference between Mesh TensorFlow's pre-trained convolutions and ours, which read them.

    mesh/bin/python tests/interop/mesh_tensorflow/make_mesh_checkpoint.py --size=small \
        --output=mesh-small
    python -m benchmarks.fidelity.mesh_tensorflow_parity mesh-small

The first command is Mesh TensorFlow's own; how to get it is at the top of that script. Random
weights, four pairs of random ids, float32 on the CPU. Without a folder: what the tests have.
"""

import argparse
import dataclasses
import resource
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from convbert_jax.config.sequences import derive_encoder_decoder
from convbert_jax.decoding import greedy
from convbert_jax.interop.mesh_tensorflow.model import END, PAD, MeshModel, forms, read

OURS = Path("tests/interop/mesh_tensorflow/mesh")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=OURS)
    folder = parser.parse_args().folder
    print(
        "| | parameters | encoder | logits | largest logit | texts equal | as trained | read in |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for place in sorted(path.parent for path in folder.glob("*/expected.npz")):
        start = time.perf_counter()
        found = read(place)
        seconds = time.perf_counter() - start
        with np.load(place / "expected.npz") as expected:
            shown = compare(found, expected)
        print(f"| {place.name} | {' | '.join(shown)} | {seconds:.1f} s |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"Largest size of the process: {peak:.1f} GiB.")


def compare(found: MeshModel, expected) -> list[str]:
    """Parameters, differences of hidden states and logits, texts that are equal where convolutions
    read the beginning as its search has it, and where they do not, as in training.
    """
    sources, targets = (jnp.asarray(expected[name]) for name in ("sources", "targets"))
    seen, real = sources != PAD, targets != PAD
    tokens = jnp.where(real, jnp.roll(targets, 1, axis=1), PAD).at[:, 0].set(PAD)
    model = found.build()
    encoded = model.encode(sources, seen.astype(jnp.int32))
    logits = model(sources, seen.astype(jnp.int32), tokens, real.astype(jnp.int32))
    count = sum(leaf.size for leaf in jax.tree.leaves(found.params))
    return [
        f"{count:,}",
        f"{np.abs(encoded - expected['encoded'])[seen].max():.1e}",
        f"{np.abs(logits - expected['logits'])[real].max():.1e}",
        f"{np.abs(expected['logits'])[real].max():.1f}",
        *(equal(found, expected, fields) for fields in reversed(forms(found.sequence))),
    ]


def equal(found: MeshModel, expected, fields: tuple[str, ...]) -> str:
    """How many of its texts, the most probable token at each step, ours writes too."""
    sequence = dataclasses.replace(found.sequence, decoder_mixer_fields=fields)
    config = derive_encoder_decoder(found.model, sequence, found.words, found.words)
    model = dataclasses.replace(found, config=config).build()
    sources = jnp.asarray(expected["sources"])
    rows, length = expected["written"].shape
    state, source = model.start(sources, (sources != PAD).astype(int), copies=1, length=length + 2)
    texts = greedy(
        lambda *step: model.step(*step, source), state, jnp.full((rows, 1), PAD),
        length=length + 2, end=END, pad=PAD, never=[],
    )  # fmt: skip
    same = (np.asarray(texts.tokens)[:, 1 : length + 1] == expected["written"]).all(axis=1)
    return f"{same.sum()} of {rows}"


if __name__ == "__main__":
    main()
