"""Pre-training: the table recipe name -> (model, loss), and the run it makes."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Collection, Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from convbert_jax.analysis import flops, pretraining_report
from convbert_jax.config import Config, from_config_dict, to_dict
from convbert_jax.data import batching, corpus
from convbert_jax.data.tokenizer import follow_file
from convbert_jax.interop import conversion, importing, matching, sources
from convbert_jax.interop.networks import outline, split
from convbert_jax.models import pretraining as models
from convbert_jax.objectives import health, masked_lm, masking, metrics, replaced_token
from convbert_jax.recipes import devices
from convbert_jax.training import compilation, loop, reporting, sharding, workdir
from convbert_jax.training.task import Task


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe name stands for; the data of all is a prepared corpus."""

    model: Callable[[Config, nnx.Rngs], nnx.Module]
    objective: ModuleType  # loss(model, batch, key, ...) -> (loss, metrics)
    warn: Callable[[int, dict[str, float]], list[str]]
    show: tuple[str, ...]  # metrics of the log line


RECIPES = {
    "replaced_token": Recipe(
        models.MODELS["replaced_token"],
        replaced_token,
        health.warn_replaced_token,
        ("mlm_loss", "mlm_accuracy", "replaced_rate", "discriminator_auc"),
    ),
    "masked_lm": Recipe(
        models.MODELS["masked_lm"],
        masked_lm,
        health.warn_masked_lm,
        ("mlm_loss", "mlm_accuracy"),
    ),
}


def prepare(config: Config, folder: pathlib.Path, given: Collection[str] = ()) -> corpus.Corpus:
    """Makes tokenizer and shards for `config` in workdir `folder`, or finds them there.

    Args:
      given: as `read_start` takes it.
    """
    config, _ = read_start(config, folder, given)
    return corpus.prepare(config, _data_folder(config, folder))


def pretrain(config: Config, folder: pathlib.Path, given: Collection[str] = ()) -> None:
    """Pre-trains in workdir `folder`, resuming what is there, and reports.

    Args:
      given: as `read_start` takes it.
    """
    found = devices.find_devices(config)
    mesh = sharding.make_mesh(config.mesh, found)
    sharding.check_batch_size(
        config.train.batch_size,
        config.train.accumulation,
        mesh,
        replicas=config.optimizer.release_replicas,
    )
    compilation.enable_compile_cache(config.train.compile_cache)
    config, source = read_start(config, folder, given)
    writer = jax.process_index() == 0
    with workdir.open_workdir(folder, config, writer=writer):
        devices.print_config(config, leave_out=("finetune", "task", "outputs"))
        if config.model.mixer == "attention":
            logging.info(
                "config.model.mixer=attention: all %d heads are of attention; head_ratio=%d counts "
                "for mixed and bottleneck only.",
                config.model.heads,
                config.model.head_ratio,
            )
        if config.model.mixer == "mixed" and config.model.mask_convolution:
            logging.info(
                "The convolutions read no padding. Hugging Face's class reads it: for padded "
                "batches there, train with --config.model.mask_convolution=false "
                "--config.data.layout=electra instead."
            )
        if config.checkpoint.huggingface_every:
            conversion.check_expressible(outline(config))
        prepared = prepare_once(config, folder)
        task = build_task(config, prepared.tokenizer.special, found[0])
        result = loop.train(
            task,
            config,
            workdir=folder,
            mesh=mesh,
            batches=batching.training_batches(
                prepared,
                batch_size=config.train.batch_size,
                seed=config.seed,
                release_shuffle=config.data.release_shuffle,
                prefetch=config.data.prefetch,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            ),
            evaluation=heldout_batches(config, prepared),
            initial_params=functools.partial(_fill, config, source) if source else None,
            publish=functools.partial(_publish, config, folder, prepared),
        )
        if not result.interrupted:  # a machine that is taken away gives little time
            _report(config, folder, prepared, result, mesh)


def prepare_once(config: Config, folder: pathlib.Path) -> corpus.Corpus:
    """The corpus of a config as `read_start` gives it: the first process prepares, the others wait
    and then open what it made.
    """
    directory = _data_folder(config, folder)
    if jax.process_count() == 1:
        return corpus.prepare(config, directory)
    from jax.experimental import multihost_utils

    if jax.process_index() == 0:
        corpus.prepare(config, directory)
    multihost_utils.sync_global_devices("corpus prepared")
    return corpus.prepare(config, directory)


def heldout_batches(config: Config, prepared: corpus.Corpus) -> Callable[[], Iterator]:
    """What gives the held-out rows of this process, from the first, each time it is called."""
    return functools.partial(
        batching.evaluation_batches,
        prepared,
        batch_size=config.train.batch_size,
        rows=config.train.eval_rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )


def build_task(config: Config, special, device: jax.Device) -> Task:
    """Closes over everything static once: the only bridge between Flax and the trainer.

    Args:
      special: ids of the special tokens of the corpus' tokenizer.
      device: one of those it will run on; decides dtype and peak FLOP/s.
    """
    recipe = RECIPES[config.recipe]
    graphdef, init = models.build(recipe.model, config)
    settings = {
        "dtype": devices.compute_dtype(config, device),
        "config": config,
        "special": masking.SpecialIds(special.cls, special.sep, special.mask),
    }

    def loss(params, batch, key):
        return recipe.objective.loss(
            nnx.merge(graphdef, params), batch, key, train=True, **settings
        )

    def evaluate(params, batch, key):
        model = nnx.merge(graphdef, params)
        return recipe.objective.loss(model, batch, key, train=False, **settings)[1]

    tokens = config.train.batch_size * config.data.length
    return Task(
        init=init,
        loss=loss,
        evaluate=evaluate,
        summarize=metrics.summarize,
        health=recipe.warn,
        show=recipe.show,
        tokens_per_step=tokens,
        flops_per_step=tokens * flops.training_flops_per_token(config),
        peak_flops_per_device=flops.peak_flops(device.device_kind),
    )


def read_start(
    config: Config, folder: pathlib.Path, given: Collection[str] = ()
) -> tuple[Config, sources.Source | None]:
    """The config with what its vocabulary file and its weights tell, and the weights of
    `config.init_from` if this start needs them; refused before any long work.

    Args:
      given: paths of fields that were asked for by name, "model.layers" for one. They stay, and
        are an error where file or weights contradict; other sizes follow these.

    Raises:
      UserError: no such file or weights, or some that do not fit.
    """
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    if not config.init_from:
        return config, None
    begun = workdir.is_bound(folder)
    if begun and (folder / workdir.CONFIG).exists():
        return _as_begun(config, folder, given), None
    source = sources.read_source(config.init_from)
    config = importing.follow_source(config, source, given)
    return config, None if begun else source


def _as_begun(config: Config, folder: pathlib.Path, given: Collection[str]) -> Config:
    """`config` with the vocabulary and the sizes that the run in `folder` took of its weights,
    which need not be there any more.
    """
    kept = workdir.read_config(folder)
    if (kept.recipe, kept.init_from) != (config.recipe, config.init_from):
        return config  # refused later, by name
    fields = matching.sizes_of(kept)
    if not config.tokenizer.path:
        section = dataclasses.asdict(kept.tokenizer)
        fields |= {f"tokenizer.{name}": value for name, value in section.items()}
    fields = {path: value for path, value in fields.items() if path not in given}
    return from_config_dict(to_dict(matching.replace(config, fields)))


def _fill(config: Config, source: sources.Source):
    """Parameters to start with: of the source, and as usual where it has none."""
    params, report = sources.initialize(config, source)
    for line in report.lines():
        logging.info("%s", line)
    return params


def _publish(config: Config, folder: pathlib.Path, prepared: corpus.Corpus, step: int, params):
    """Writes WORKDIR/huggingface/step-N, to be uploaded as a revision."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        params = multihost_utils.process_allgather(params, tiled=True)
    if jax.process_index() == 0:
        conversion.write_huggingface(
            folder / "huggingface" / f"step-{step}",
            split(config, jax.device_get(params)),
            (prepared.tokenizer, config.tokenizer),
            title=config.name,
            step=step,
            compare=False,
        )


def _data_folder(config: Config, folder: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(config.data.directory) if config.data.directory else folder / "data"


def _report(config, folder, prepared, result, mesh) -> None:
    """Draws the curves and prints what the run has learned."""
    if jax.process_index() != 0:
        return
    with jax.set_mesh(mesh):
        example = _take_apart(config, prepared, result.state.params)
    picture = folder / "curves.png"
    title = f"{config.name}, step {result.step:,}"
    drawn = pretraining_report.plot_curves(folder / reporting.METRICS_FILE, picture, title)
    report = [f"{title}, on held-out text:"]
    if result.evaluation:
        numbers = pretraining_report.describe_numbers(
            result.evaluation, config.tokenizer.vocab_size
        )
        report += [f"  {line}" for line in numbers]
    report += ["", *example] if example else []
    report += [
        "",
        (f"Curves: {picture}. " if drawn else "")
        + "The same command goes on from here; for more steps add "
        f"--config.train.steps={2 * result.step}.",
        "Your own text: add --config.data.source='text:FOLDER/*.txt' --workdir=runs/mine",
    ]
    print("\n".join(report), flush=True)


def _take_apart(config: Config, prepared: corpus.Corpus, params) -> list[str]:
    """Held-out rows after the generator, as the discriminator sees them; the first one in full."""
    if config.recipe != "replaced_token" or jax.process_count() > 1:
        return []
    graphdef, _ = models.build(RECIPES[config.recipe].model, config)
    special = prepared.tokenizer.special

    @jax.jit
    def run(params, batch):
        model = nnx.merge(graphdef, params)
        corrupted = replaced_token.corrupt(
            model,
            batch,
            jax.random.key(config.seed),
            train=False,
            dtype=jnp.float32,
            config=config,
            special=masking.SpecialIds(special.cls, special.sep, special.mask),
        )[-1]
        ids, types = batch["segment_ids"], batch["type_ids"]
        return corrupted, model.discriminate(corrupted, ids, types, dtype=jnp.float32, key=None)

    batch = next(batching.evaluation_batches(prepared, batch_size=32, rows=32))
    corrupted, scores = jax.device_get(run(params, batch))
    lines, replaced, found, tokens = [], 0, 0, 0
    for new, old, score, ids in zip(
        corrupted, batch["tokens"], scores, batch["segment_ids"], strict=True
    ):
        real = np.flatnonzero(ids)
        new, old = new[real], old[real]
        suspects = pretraining_report.find_suspects(new != old, score[real])
        replaced, found = replaced + (new != old).sum(), found + (suspects & (new != old)).sum()
        tokens += len(real)
        if not lines:
            pieces = prepared.tokenizer.pieces
            lines = pretraining_report.mark_replaced(pieces(new), pieces(old), suspects)
    return [
        "A held-out text: [new<old] was put in by the generator, ! marks as many subwords as were",
        "replaced, those that the discriminator suspects most:",
        *(f"  {line}" for line in lines),
        f"Over 32 such rows {found / max(1, replaced):.0%} of its suspects are new; by chance "
        f"{replaced / max(1, tokens):.0%}.",
    ]
