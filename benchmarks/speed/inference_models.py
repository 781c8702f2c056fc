"""One model in three programs: this package, Hugging Face's class and ONNX Runtime."""

import dataclasses
import os
from pathlib import Path
from typing import Any

from benchmarks import public_data


def prepare(folder: Path, size: str, **changed: Any) -> None:
    """Writes a run of configs/SIZE.py with random weights, and its exports.

    The run is folder/run, its export with ONNX files is folder/exported. Existing files are kept.

    Args:
      changed: config fields by path, in addition to BERT's vocabulary and rows of 512.
    """
    if (folder / "exported").exists():
        return
    import jax
    import numpy as np

    import convbert_jax
    from convbert_jax.interop import conversion, networks
    from convbert_jax.training import optimizer, train_step
    from convbert_jax.training.checkpoints import Checkpoints
    from convbert_jax.workdir import Workdir

    fields = {"data.length": 512, "model.positions": 512}
    if "tokenizer.path" not in changed:
        fields["tokenizer.path"] = str(public_data.folder("vocab") / "bert-base-uncased-vocab.txt")
        fields |= {"tokenizer.kind": "wordpiece", "tokenizer.vocab_size": 30_522}
    config = convbert_jax.load_config(size, **{**fields, **changed})
    rng = np.random.default_rng(0)

    def draw(path, leaf):
        center = float(path[-1].key == "scale")
        return (center + 0.05 * rng.standard_normal(leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, networks.abstract_params(config))
    made = optimizer.make_optimizer(config.optimizer, config.train.steps)
    filled = train_step.create_state(jax.tree.map(jax.numpy.asarray, params), made)
    filled = dataclasses.replace(filled, step=jax.numpy.asarray(1, jax.numpy.int32))
    run = Workdir(folder / "run")
    with run.open(config):
        checkpoints = Checkpoints(run.checkpoints, config.checkpoint)
        checkpoints.save(filled, {})
        checkpoints.close()
    conversion.export(folder / "run", output=folder / "exported", form="onnx")


class Models:
    """The three models, each with all threads of this process.

    Ours and PyTorch compute in `dtype`, ONNX Runtime in float32.
    """

    def __init__(self, folder: Path, dtype: str = "float32"):
        import onnxruntime
        import torch
        import transformers

        import convbert_jax

        threads = len(os.sched_getaffinity(0))
        torch.set_num_threads(threads)
        self.folder = folder
        self.dtype = dtype
        self.ours = convbert_jax.load(folder / "run", dtype=dtype)
        self.torch = transformers.AutoModel.from_pretrained(folder / "exported", dtype=dtype).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        self.session = onnxruntime.InferenceSession(
            folder / "exported" / "onnx" / "model.onnx", options, providers=["CPUExecutionProvider"]
        )
        self.names = [x.name for x in self.session.get_inputs()]  # ModernBERT has no types

    def run_onnx(self, *arrays):
        """Returns hidden states [B, L, C] of tokens, mask and types."""
        given = dict(zip(self.names, arrays, strict=False))
        return self.session.run(["last_hidden_state"], given)[0]

    def run_torch(self, *arrays):
        import torch

        with torch.inference_mode():
            tensors = zip(self.names, map(torch.from_numpy, arrays), strict=False)
            return self.torch(**dict(tensors)).last_hidden_state.float().numpy()
