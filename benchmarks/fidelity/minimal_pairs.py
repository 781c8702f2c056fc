"""Compares pseudo-log-likelihoods of BLiMP sentences with minicons (Misra, 2022).

    pip install --no-deps minicons wonderwords
    python -m benchmarks.fidelity.minimal_pairs FOLDER

FOLDER is a Hugging Face folder of a masked language model that was trained here, without the mask
of the convolution. Needs the data folder (CONVBERT_DATA).
"""

import argparse

import numpy as np

import convbert_jax
from benchmarks import public_data
from convbert_jax import minimal_pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="Hugging Face folder of a masked language model")
    parser.add_argument("--limit", type=int, default=3, help="pairs of each of the 67 files")
    arguments = parser.parse_args()
    from minicons import scorer

    paradigms = minimal_pairs.read(public_data.folder("blimp"), arguments.limit)
    texts = [text for paradigm in paradigms for pair in paradigm.pairs for text in pair]
    ours = np.array(convbert_jax.load(arguments.folder).log_likelihood(texts))
    model = scorer.MaskedLMScorer(arguments.folder, "cpu")
    model.tokenizer.batch_encode_plus = model.tokenizer  # the name before transformers 5
    theirs = np.concatenate(
        [
            model.sequence_score(
                texts[start : start + 32],
                reduction=lambda scores: scores.sum(0).item(),
                PLL_metric="original",
            )
            for start in range(0, len(texts), 32)
        ]
    )
    print(f"{len(texts)} sentences, mean log probability {theirs.mean():.1f} nats")
    print(f"largest difference: {np.abs(ours - theirs).max():.1e} nats")
    preferred = [scores[::2] > scores[1::2] for scores in (ours, theirs)]
    print(f"pairs with another decision: {(preferred[0] != preferred[1]).sum()}")


if __name__ == "__main__":
    main()
