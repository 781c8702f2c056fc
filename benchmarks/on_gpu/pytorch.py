"""Hugging Face's ConvBERT and BERT in PyTorch: forward and backward, as section step has ours.

ConvBERT learns replaced tokens: a generator and a discriminator of the sizes of our config, the
head of words at the masked positions alone, as ours; tokens are drawn from what it predicts. Tables
are not shared by the two. BERT learns masked words at the size of the discriminator. Matrices are
multiplied in bfloat16 by autocast; there is no padding and no mask.
"""

import importlib.util
import statistics
import time

from benchmarks.on_gpu import steps
from benchmarks.on_gpu.session import Session

CASES = (  # (size, model, by torch.compile), the most telling first
    ("base", "convbert", False),
    ("base", "bert", False),
    ("base", "convbert", True),
    ("small", "convbert", False),
    ("small", "convbert", True),
    ("base", "bert", True),
    ("small", "bert", False),
    ("small", "bert", True),
)
SMOKED = (("tiny", "convbert", False), ("tiny", "bert", False), ("tiny", "convbert", True))
ROUNDS, IN_A_ROW = 5, 4


def parts(smoke: bool) -> list[str]:
    return list(_names(smoke))


def _names(smoke: bool) -> dict[str, tuple[str, str, bool]]:
    return {
        f"{size}, {model}, {'torch.compile' if compiles else 'eager'}": (size, model, compiles)
        for size, model, compiles in (SMOKED if smoke else CASES)
    }


def run(session: Session, part: str, smoke: bool) -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            session.write("left_out", part, error=f"{name} is not installed")
            return
    import torch

    if not smoke and not torch.cuda.is_available():
        session.write("left_out", part, error=f"this torch, {torch.__version__}, finds no CUDA")
        return
    size, model, compiles = _names(smoke)[part]
    session.plan([part])
    if smoke and compiles:
        session.write("left_out", part, error="torch.compile has no smoke")
        return
    session.run(part, lambda: _with_memory(session, size, model, compiles, smoke))


def _with_memory(session: Session, size: str, model: str, compiles: bool, smoke: bool) -> dict:
    """With the batch of the config, or half of it until it fits, which `batch` then says."""
    import torch

    config = steps.read_config(size, steps.SMOKE if smoke else {})
    batch = config.train.batch_size
    while True:
        try:
            return _measure(session, config, model, batch, compiles, "cpu" if smoke else "cuda")
        except torch.OutOfMemoryError:
            if batch // 2 < steps.LEAST:
                raise
            batch //= 2
        torch.cuda.empty_cache()


def _measure(session: Session, config, model: str, batch: int, compiles: bool, device: str) -> dict:
    import torch

    torch.manual_seed(0)
    torch._dynamo.reset()
    network, loss_of = (_convbert if model == "convbert" else _bert)(config, device)
    length, masked = config.data.length, round(config.objective.mask_fraction * config.data.length)
    given = {"device": device}
    tokens = torch.randint(5, config.tokenizer.vocab_size, (batch, length), **given)
    positions = torch.rand(batch, length, **given).topk(masked).indices
    if compiles:
        loss_of = torch.compile(loss_of)

    def step():
        network.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(tokens, positions)
        loss.backward()
        return loss

    def wait():
        if device == "cuda":
            torch.cuda.synchronize()

    started = time.perf_counter()
    with session.compiling():
        step(), wait()
        first = time.perf_counter() - started
        step(), wait()
        network.zero_grad(set_to_none=True)
        if device == "cuda":  # the others compile yet, and one after the other has it all
            torch.cuda.empty_cache()
    seconds = []
    with session.alone():
        step(), wait()
        for _ in range(ROUNDS):
            started = time.perf_counter()
            for _ in range(IN_A_ROW):
                loss = step()
            wait()
            seconds.append((time.perf_counter() - started) / IN_A_ROW)
    rate = batch * length / statistics.median(seconds)
    return {
        "tokens_per_s": rate,
        "ms": 1e3 * statistics.median(seconds),
        "batch": batch,
        "length": length,
        "loss": float(loss.detach()),
        "parameters": sum(p.numel() for p in network.parameters()),
        "seconds_to_first_step": first,
        "most_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


def _sizes(config, hidden: int, heads: int, ffn: int) -> dict:
    """Arguments that ConvBertConfig and BertConfig have in common."""
    return {
        "vocab_size": config.tokenizer.vocab_size,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "num_hidden_layers": config.model.layers,
        "hidden_dropout_prob": config.model.dropout,
        "attention_probs_dropout_prob": config.model.attention_dropout,
    }


def _masked(tokens, positions, mask: int):
    return tokens.scatter(1, positions, mask), tokens.gather(1, positions)


def _at(hidden, positions):
    """[B, M, C] of [B, L, C]."""
    return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))


def _convbert(config, device: str):
    import torch
    import transformers

    model = config.model
    small = round(model.hidden_size * config.generator.size)
    generator_sizes = _sizes(
        config, small, max(1, int(model.heads * config.generator.size + 1e-9)), 4 * small
    )
    generator_sizes["num_hidden_layers"] = max(1, round(model.layers * config.generator.layers))
    more = {
        "embedding_size": model.embedding_size,
        "conv_kernel_size": model.kernel_size,
        "head_ratio": model.head_ratio,
        "num_groups": model.ffn_groups,
    }
    hidden = model.hidden_size
    network = torch.nn.ModuleDict(
        {
            "generator": transformers.ConvBertForMaskedLM(
                transformers.ConvBertConfig(**generator_sizes, **more)
            ),
            "discriminator": transformers.ConvBertModel(
                transformers.ConvBertConfig(
                    **_sizes(config, hidden, model.heads, model.ffn_size), **more
                )
            ),
            "head": torch.nn.Sequential(
                torch.nn.Linear(hidden, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, 1)
            ),
        }
    )
    network.to(device).train()
    generator, losses = network["generator"], torch.nn.functional

    def loss(tokens, positions):
        shown, labels = _masked(tokens, positions, 4)
        words = _at(generator.convbert(shown)[0], positions)
        logits = generator.generator_lm_head(generator.generator_predictions(words)).float()
        mlm = losses.cross_entropy(logits.flatten(0, 1), labels.flatten())
        noise = -torch.empty_like(logits).exponential_().log()  # Gumbel's: the largest is a sample
        drawn = (logits.detach() + noise).argmax(-1)
        corrupted = tokens.scatter(1, positions, drawn)
        found = network["head"](network["discriminator"](corrupted)[0])[..., 0].float()
        replaced = (corrupted != tokens).float()
        detection = losses.binary_cross_entropy_with_logits(found, replaced)
        o = config.objective
        return o.generator_weight * mlm + o.discriminator_weight * detection

    return network, loss


def _bert(config, device: str):
    import torch
    import transformers

    model = config.model
    sizes = _sizes(config, model.hidden_size, model.heads, model.ffn_size)
    network = transformers.BertForMaskedLM(
        transformers.BertConfig(**sizes, attn_implementation="sdpa")
    )
    network.to(device).train()

    def loss(tokens, positions):
        shown, labels = _masked(tokens, positions, 4)
        logits = network.cls(_at(network.bert(shown)[0], positions)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return network, loss
