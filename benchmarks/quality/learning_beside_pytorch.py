"""Compares the masked LM losses of a run with transformers' class trained in PyTorch.

    python -m convbert_jax.main --config=configs/tiny.py --workdir=runs/ours \
        --config.recipe=masked_lm --config.data.layout=electra --config.optimizer.method=adamw \
        --config.model.mixer=attention
    python -m benchmarks.quality.learning_beside_pytorch --run=runs/ours --seeds 0 1

The class is BERT for config.model.mixer=attention and ConvBERT for mixed (the default). It has the
sizes, schedule and rows of the run, in the same order. The rest is independent: initialization by
transformers, masks by numpy, AdamW, clipping and autograd by PyTorch, float32. Prints held-out
losses of masked tokens next to the losses that the run logged. `--seeds` shows the variation
between seeds. Needs torch and transformers.
"""

import argparse
import os
import sys
from collections.abc import Iterator

import numpy as np

from benchmarks import timing
from convbert_jax.config import Config, ConfigError, UserError

IGNORED = -100  # label that PyTorch's cross entropy ignores
_HELD_OUT = 1_000_003  # seed of the constant held-out masks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="workdir of a finished run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds in PyTorch")
    arguments = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        compare(arguments.run, arguments.seeds)
    except UserError as error:
        sys.exit(f"error: {error}")


def compare(folder: str, seeds: list[int]) -> None:
    from convbert_jax.recipes import tasks
    from convbert_jax.training.metrics_writer import read_metrics
    from convbert_jax.workdir import Workdir

    workdir = Workdir(folder)
    config = workdir.read_config()
    check(config)
    data = tasks.open_data(config, workdir)
    ours = {
        record["step"]: record["mlm_loss"]
        for record in read_metrics(workdir.metrics)
        if record["split"] == "validation"
    }
    print(f"held-out loss of masked tokens, mixer {config.model.mixer}, rows of the run's seed")
    table = timing.Table("step", "ours", *(f"PyTorch, seed {seed}" for seed in seeds))
    for losses in zip(*(learn(config, data, seed) for seed in seeds), strict=True):
        step = losses[0][0]
        table.add(step, ours.get(step), *(loss for _, loss in losses))


def check(config: Config) -> None:
    """Raises ConfigError for a run that PyTorch's classes and `learn` do not support."""
    wanted = {
        "recipe": "masked_lm",
        "data.layout": "electra",  # attention would mix the texts of packed rows
        "optimizer.method": "adamw",
        "optimizer.bias_correction": True,
        "optimizer.decay_embeddings": True,
        "train.accumulation": 1,
        "objective.sentence_pairs": "none",
    }
    for path, value in wanted.items():
        section, _, name = path.rpartition(".")
        found = getattr(getattr(config, section) if section else config, name)
        if found != value:
            raise ConfigError(f"the run has config.{path}={found!r}; only {value!r} is supported.")
    if config.model.mixer not in ("attention", "mixed"):
        raise ConfigError(
            f"the run has config.model.mixer={config.model.mixer!r}; transformers supports "
            "attention and mixed."
        )


def learn(config: Config, data, seed: int) -> Iterator[tuple[int, float]]:
    """Trains in PyTorch; yields (step, held-out loss) at the run's evaluations."""
    import torch

    from convbert_jax.training.optimizer import make_schedule

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(seed)
    model = make_model(config)
    section = config.optimizer
    plain = [p for n, p in model.named_parameters() if n.endswith("bias") or "LayerNorm" in n]
    kept = {id(parameter) for parameter in plain}
    decayed = [p for p in model.parameters() if id(p) not in kept]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": section.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
    )
    special = np.fromiter(data.tokenizer.special.by_name.values(), int)
    mask = Mask(config, special, data.tokenizer.special.mask, data.tokenizer.vocab_size)
    rng = np.random.default_rng(seed)
    batches = data.training(None)
    rates = np.asarray(make_schedule(section, config.train.steps)(np.arange(config.train.steps)))
    for step, rate in enumerate(rates.tolist()):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, mask(next(batches), rng)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if section.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        optimizer.step()
        if (step + 1) % config.train.eval_every == 0 or step + 1 == config.train.steps:
            yield step + 1, evaluate(model, mask, data.heldout(None)()[""])
    batches.close()


def make_model(config: Config):
    """Returns BertForMaskedLM or ConvBertForMaskedLM, initialized by transformers."""
    import transformers

    model = config.model
    sizes = {
        "vocab_size": config.tokenizer.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ffn_size,
        "max_position_embeddings": model.positions,
        "type_vocab_size": model.types,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "layer_norm_eps": model.layer_norm_epsilon,
        "initializer_range": model.initializer_range,
    }
    if model.mixer == "attention":
        return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    of_convolution = {
        "embedding_size": model.embedding_size,
        "head_ratio": model.head_ratio,
        "conv_kernel_size": model.kernel_size,
        "num_groups": model.ffn_groups,
    }
    return transformers.ConvBertForMaskedLM(transformers.ConvBertConfig(**sizes | of_convolution))


class Mask:
    """Masks tokens of a batch by `config.objective`, with separate random numbers."""

    def __init__(self, config: Config, special: np.ndarray, mask_id: int, words: int):
        self._objective, self._special = config.objective, special
        self._mask_id, self._words = mask_id, words

    def __call__(self, batch, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Returns tokens, types, attention mask (1: not padding) and labels; all [B, L]."""
        objective, tokens = self._objective, np.array(batch["tokens"])
        real = np.array(batch["segment_ids"]) > 0
        free = real & ~np.isin(tokens, self._special)
        wanted = np.maximum(1, np.round(objective.mask_fraction * real.sum(1))).astype(int)
        rank = np.argsort(np.argsort(np.where(free, rng.random(tokens.shape), 2.0), 1), 1)
        chosen = free & (rank < wanted[:, None])
        what = rng.random(tokens.shape)
        masks = what < objective.mask_token_fraction
        random = ~masks & (what < objective.mask_token_fraction + objective.random_token_fraction)
        labels = np.where(chosen, tokens, IGNORED)
        tokens[chosen & masks] = self._mask_id
        drawn = rng.integers(0, self._words, tokens.shape)
        tokens[chosen & random] = drawn[chosen & random]
        return {
            "tokens": tokens,
            "types": np.array(batch["type_ids"]),
            "real": real.astype(int),
            "labels": labels,
        }


def loss_of(model, batch: dict[str, np.ndarray]):
    """Returns the cross entropy in nats of each masked token of a batch."""
    import torch

    tokens, types, real, labels = (torch.as_tensor(a, dtype=torch.long) for a in batch.values())
    logits = model(input_ids=tokens, token_type_ids=types, attention_mask=real).logits
    chosen = labels != IGNORED
    return torch.nn.functional.cross_entropy(logits[chosen], labels[chosen], reduction="none")


def evaluate(model, mask: Mask, batches) -> float:
    """Returns the mean loss of masked tokens of held-out rows, with constant masks."""
    import torch

    rng = np.random.default_rng(_HELD_OUT)
    model.eval()
    with torch.no_grad():
        losses = [loss_of(model, mask(batch, rng)) for batch in batches]
    model.train()
    return float(torch.cat(losses).mean())


if __name__ == "__main__":
    main()
