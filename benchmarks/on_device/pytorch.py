"""Training steps of Hugging Face's ConvBERT and BERT in PyTorch, at the shapes of steps.py.

ConvBERT is trained by replaced-token detection with the generator and discriminator sizes of our
config; logits are computed at masked positions only, as in this package. The two models do not
share embeddings. BERT is trained by masked language modeling at the size of the discriminator, with
PyTorch's scaled_dot_product_attention. Products use bfloat16 autocast; there is no padding.
"""

import statistics
import time

from benchmarks.on_device import steps
from benchmarks.on_device.schedule import Results

ROUNDS, IN_A_ROW = 5, 4


def measure(results: Results, job: str, rehearse: bool) -> None:
    """Writes the speed of a step.

    Args:
      job: "pytorch SIZE MODEL", or "compiled SIZE MODEL" for torch.compile.
    """
    import torch

    how, size, model = job.split()
    config, device = steps.read_config(f"step {size}", rehearse), "cpu" if rehearse else "cuda"
    batch = config.train.batch_size
    while True:
        try:
            return _measure(results, job, config, model, batch, how == "compiled", device)
        except torch.OutOfMemoryError:
            if batch // 2 < steps.LEAST_ROWS:
                raise
            batch //= 2
        torch.cuda.empty_cache()


def _measure(results, job, config, model: str, batch: int, compiles: bool, device: str) -> None:
    import torch

    torch.manual_seed(0)
    network, loss_of = (_convbert if model == "convbert" else _bert)(config, device)
    optimizer = torch.optim.AdamW(network.parameters(), config.optimizer.learning_rate, fused=True)
    length, masked = config.data.length, round(config.objective.mask_fraction * config.data.length)
    given = {"device": device}
    tokens = torch.randint(5, config.tokenizer.vocab_size, (batch, length), **given)
    positions = torch.rand(batch, length, **given).topk(masked).indices
    if compiles:
        loss_of = torch.compile(loss_of)

    def run(count):
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(tokens, positions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count

    first = run(1)
    with results.timing():
        run(1)
        seconds = statistics.median(run(IN_A_ROW) for _ in range(ROUNDS))
    results.write(
        job,
        "figures",
        tokens_per_s=batch * length / seconds,
        ms=1e3 * seconds,
        batch=batch,
        length=length,
        parameters=sum(p.numel() for p in network.parameters()),
        seconds_to_first_step=first,
        most_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None,
    )


def _sizes(config, hidden: int, heads: int, ffn: int) -> dict:
    """Returns common arguments of ConvBertConfig and BertConfig."""
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
    """Gathers [B, M, C] from [B, L, C]."""
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
        noise = -torch.empty_like(logits).exponential_().log()  # Gumbel: argmax samples
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
