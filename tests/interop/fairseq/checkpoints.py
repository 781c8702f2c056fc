"""Checkpoints in the format of fairseq's training; imports PyTorch only when creating one."""

import argparse
from pathlib import Path

import pytest

PAD, END = 1, 2
LONGEST = 40


def build(a, sizes):
    """Build the published model with random weights.

    Args:
      a: fairseq's arguments.
      sizes: number of words in the source and target dictionaries, or in a language model's single
        dictionary.
    """
    torch = pytest.importorskip("torch")
    from tests.interop.fairseq.published import Published

    torch.manual_seed(0)
    return Published(a, sizes[-1], *sizes[:-1]).eval()


def arguments(arch="lightconv_iwslt_de_en", **changed) -> argparse.Namespace:
    """Return the arguments that fairseq stores in a checkpoint, for a small model."""
    both = {
        "embed_dim": 16, "ffn_embed_dim": 24, "attention_heads": 4, "layers": 3,
        "normalize_before": False, "learned_pos": False, "conv_type": "dynamic", "glu": True,
        "kernel_size_list": [3, 5, 5],
    }  # fmt: skip
    values = {
        **{f"encoder_{name}": value for name, value in both.items()},
        **{f"decoder_{name}": value for name, value in both.items()},
        "arch": arch, "task": "translation", "source_lang": "de", "target_lang": "en",
        "dropout": 0.3, "attention_dropout": 0.1, "weight_dropout": 0.1, "input_dropout": 0.1,
        "share_all_embeddings": False, "share_decoder_input_output_embed": False,
        "no_token_positional_embeddings": False, "adaptive_softmax_cutoff": None,
        "weight_softmax": True, "max_source_positions": LONGEST, "max_target_positions": LONGEST,
        "encoder_embed_path": None, "lr": [0.0005], "clip_norm": 0.0,
    }  # fmt: skip
    return argparse.Namespace(**values | changed)


def write_dictionary(path: Path, words: int) -> None:
    """Write a dictionary of `words` entries; the four special ones have no line."""
    path.write_text("".join(f"w{i}{'@@' * (i % 2)} {words - i}\n" for i in range(words - 4)))


def write(folder: Path, model, a, sizes, /, **changed) -> Path:
    """Write model.pt and the dictionaries as fairseq does; return the path of model.pt."""
    import torch

    names = ("dict.de.txt", "dict.en.txt") if len(sizes) > 1 else ("dict.txt",)
    for name, size in zip(names, sizes, strict=True):
        write_dictionary(folder / name, size)
    state = {
        "args": a,
        "model": model.state_dict(),
        "optimizer_history": [{"criterion_name": "X", "best_loss": 3.5, "num_updates": 7}],
        "extra_state": {"train_iterator": {"epoch": 2}, "val_loss": 4.5},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(5, 5)}}, "param_groups": []},
    }
    torch.save(state | changed, folder / "model.pt")
    return folder / "model.pt"
