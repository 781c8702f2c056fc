"""Largest output difference from the PyTorch classes, by size and direction of conversion.

    pip install torch==2.13.0 "transformers>=5"      # not in requirements.txt
    python -m benchmarks.fidelity.conversion

Random weights with standard deviation --spread (layer norms around 1), 4 rows of 128 random tokens,
full and right-padded, float32. The column "Paddle port" is the largest difference that the Paddle
port of the published weights reports in its README, for different weights and inputs.
"""

import argparse
import dataclasses
import importlib
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks import timing
from convbert_jax.config import from_config_dict
from convbert_jax.interop import huggingface, networks, parity, tensorflow1

PADDLE = {"small": "2.9e-6", "medium_small": "2.8e-6", "base": "8.1e-6"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(PADDLE))
    parser.add_argument("--spread", type=float, default=0.05, help="standard deviation of weights")
    arguments = parser.parse_args()
    heads = ("discriminator, hidden", "its logits", "generator, hidden", "its logits")
    table = timing.Table("model", "direction", *heads, "Paddle port", "seconds")
    for size in arguments.sizes:
        parts = make_networks(size, arguments.spread)
        for direction, measure in DIRECTIONS.items():
            start = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                found = measure(Path(folder), parts)
            shown = (
                f"{max(v for k, v in found[name].items() if k.startswith(kind)):.1e}"
                for name, head in (("main", "rtd_head"), ("generator", "mlm_head"))
                for kind in ("hidden", head)
            )
            table.add(size, direction, *shown, PADDLE[size], time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory {peak:.1f} GiB, including PyTorch's loading of the folders")


def make_networks(size: str, spread: float) -> dict[str, networks.Network]:
    """Returns discriminator and generator of a published size, with consistent heads for small."""
    config = importlib.import_module(f"configs.{size}").get_config("paper").to_dict()
    config["generator"]["release_heads"] = size != "small"
    config = from_config_dict(config)
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        center = 1.0 if path.endswith("/scale") else 0.0
        return (center + spread * rng.standard_normal(leaf.shape)).astype(np.float32)

    flat = networks.flatten_params(networks.abstract_params(config))
    tree = networks.to_tree({path: draw(path, leaf) for path, leaf in flat.items()})
    return networks.split(config, tree)


def from_pytorch(folder: Path, parts):
    """PyTorch saves, this package reads; compared with the outputs of the PyTorch classes."""
    import transformers

    found = {}
    for name, network in parts.items():
        ours, theirs = folder / name, folder / f"{name}-theirs"
        huggingface.write_network(ours, network, pad_id=0)
        kind = huggingface.architecture(network)
        getattr(transformers, kind).from_pretrained(ours).save_pretrained(theirs)
        read = huggingface.read_folder(theirs).networks["main"]
        if network.has("rtd_head"):  # has no PyTorch class
            head = {k: v for k, v in network.parameters.items() if k.startswith("rtd_head")}
            read = dataclasses.replace(read, parameters={**read.parameters, **head})
            found[name] = certify(ours, read)
        else:
            found[name] = certify(theirs, read)
    return found


def to_pytorch(folder: Path, parts):
    """This package saves, PyTorch reads."""
    found = {}
    for name, network in parts.items():
        huggingface.write_network(folder / name, network, pad_id=0)
        found[name] = certify(folder / name, network)
    return found


def through_tensorflow(folder: Path, parts):
    """This package saves in TensorFlow format, reads it, exports to Hugging Face; PyTorch reads."""
    tensorflow1.write_checkpoint(folder / "model.ckpt-0", parts, step=0)
    return to_pytorch(folder, tensorflow1.read_checkpoint(folder / "model.ckpt-0").networks)


def certify(folder: Path, network):
    return parity.check_parity(folder, network).differences


DIRECTIONS = {
    "PyTorch class -> ours": from_pytorch,
    "ours -> PyTorch class": to_pytorch,
    "ours -> TensorFlow 1 -> ours -> PyTorch class": through_tensorflow,
}

if __name__ == "__main__":
    main()
