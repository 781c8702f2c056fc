"""Pre-training: the table recipe name -> (model, loss), and the run it makes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import nnx

from convbert_jax.analysis import flops, health, pretraining_report
from convbert_jax.config import Config, from_config_dict, network, to_dict
from convbert_jax.data.corpus import batching, corpus
from convbert_jax.data.tokenizer.tokenizer import follow_file
from convbert_jax.interfaces.special_ids import SpecialIds
from convbert_jax.interop import conversion, importing, matching, sources
from convbert_jax.interop.networks import outline, split
from convbert_jax.models import pretraining as models
from convbert_jax.models.build import build
from convbert_jax.models.mixers import sharding_rules
from convbert_jax.objectives import masked_lm, metrics, replaced_token
from convbert_jax.recipes import teaching
from convbert_jax.recipes.results import PretrainingResult
from convbert_jax.training import loop, sharding
from convbert_jax.training.environment import devices, peers
from convbert_jax.training.reports import reporting
from convbert_jax.training.task import Task
from convbert_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a recipe name stands for; the data of all is a prepared corpus."""

    model: Callable[[Config, nnx.Rngs], nnx.Module]
    objective: ModuleType  # loss(model, batch, key, ...) -> (loss, metrics)
    warn: Callable[[int, dict[str, float]], list[str]]
    show: tuple[str, ...]  # metrics of the log line, if the config has them


RECIPES = {
    "replaced_token": Recipe(
        models.MODELS["replaced_token"],
        replaced_token,
        health.warn_replaced_token,
        ("mlm_loss", "mlm_accuracy", "encoder_mlm_loss", "replaced_rate", "discriminator_auc"),
    ),
    "masked_lm": Recipe(
        models.MODELS["masked_lm"],
        masked_lm,
        health.warn_masked_lm,
        ("mlm_loss", "mlm_accuracy", "pair_accuracy"),
    ),
}


def prepare(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> corpus.Corpus:
    """Makes tokenizer and shards for `config` in the workdir `folder`, or finds them there.

    Args:
      given: as `read_start` takes it.
    """
    workdir = Workdir(folder)
    config, _ = read_start(config, workdir, given)
    return corpus.prepare(config, workdir.data(config))


def pretrain(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> PretrainingResult:
    """Pre-trains in the workdir `folder`, resuming what is there.

    Args:
      given: as `read_start` takes it.

    Raises:
      UserError: what cannot be used, or gave out; see the kinds of it and `loop.train`.
    """
    found = devices.find_devices(config)
    mesh = sharding.make_mesh(config.mesh, found)
    sharding.check_batch_size(
        config.train.batch_size,
        config.train.accumulation,
        mesh,
        replicas=config.optimizer.release_replicas,
    )
    workdir = Workdir(folder)
    config, source = read_start(config, workdir, given)
    teacher = teaching.open_teacher(config)
    if teacher and config.distillation.initialize and not workdir.is_bound():
        source = teaching.start_of(config, teacher)
    writer = jax.process_index() == 0
    with devices.random_numbers(found), workdir.open(config, writer=writer):
        devices.print_config(config, leave_out=("finetune", "task", "outputs"))
        teaching.bind(workdir, config, teacher, writer=writer)
        if idle := network.idle_fields(config.model):
            logging.info(
                "%s say nothing here: each stage has its own, or a mixer that does not read them.",
                ", ".join(f"config.model.{f}={getattr(config.model, f)}" for f in idle),
            )
        if outline(config)["main"].masked:
            logging.info(
                "The convolutions read no padding. Hugging Face's class reads it: for padded "
                "batches there, train with --config.model.mask_convolution=false "
                "--config.data.layout=electra instead."
            )
        if first := config.objective.masked_lm_steps:
            logging.info(
                "Steps 1 to %d train the encoder on masked words, those from %d on on replaced "
                "tokens.",
                first,
                first + 1,
            )
        if config.checkpoint.huggingface_every:
            conversion.check_expressible(outline(config))
        prepared = prepare_once(config, workdir)
        task = build_task(config, prepared.tokenizer.special, found[0], teacher)
        result = loop.train(
            task,
            config,
            workdir=workdir,
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
            publish=functools.partial(_publish, config, workdir, prepared),
        )
        return _conclude(config, workdir, prepared, result, mesh)


def prepare_once(config: Config, workdir: Workdir) -> corpus.Corpus:
    """The corpus of a config as `read_start` gives it: the first process prepares, the others wait
    and then open what it made.
    """
    directory = workdir.data(config)
    if jax.process_count() > 1:
        if jax.process_index() == 0:
            corpus.prepare(config, directory)
        peers.wait_for_all("corpus prepared")
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


def build_task(
    config: Config,
    special: SpecialIds,
    device: jax.Device,
    teacher: teaching.Teacher | None = None,
) -> Task:
    """Closes over everything static once: the only bridge between Flax and the trainer.

    Args:
      teacher: needed to train with config.distillation.teacher; evaluations do without.
      special: ids of the special tokens of the corpus' tokenizer.
      device: one of those it will run on; decides dtype and peak FLOP/s.
    """
    recipe = RECIPES[config.recipe]
    graphdef, init = build(recipe.model, config)
    first = config.objective.masked_lm_steps
    settings = {
        "dtype": devices.compute_dtype(config, device),
        "config": config,
        "special": special,
    }

    def loss(params, batch, key, *given):
        model, more = nnx.merge(graphdef, params), {}
        if teacher:
            more["teacher"] = teacher.over(given[0], config)
        elif first:
            more["masked_first"] = given[0]
        return recipe.objective.loss(model, batch, key, train=True, **settings, **more)

    def evaluate(params, batch, key):
        model = nnx.merge(graphdef, params)
        return recipe.objective.loss(model, batch, key, train=False, **settings)[1]

    tokens = config.train.batch_size * config.data.length
    # The teacher's stages may have other mixers than those of the same number in the student.
    rules = teacher.rules if teacher else ()
    return Task(
        init=init,
        loss=loss,
        summarize=metrics.summarize,
        evaluate=evaluate,
        evaluator=metrics.heldout(config.heldout_metrics),
        rules=(*rules, *sharding_rules(config.encoder), *sharding.RULES),
        health=functools.partial(_warn, recipe, first),
        show=tuple(name for name in recipe.show if name in config.heldout_metrics),
        tokens_per_step=tokens,
        flops_per_step=tokens * flops.training_flops_per_token(config),
        peak_flops_per_device=flops.peak_flops(device.device_kind),
        phase=(lambda step: (step < first,)) if first else (lambda step: ()),
        frozen=teacher.params if teacher else None,
    )


def _warn(recipe: Recipe, first: int, step: int, values: dict[str, float]) -> list[str]:
    """Warnings of a run that learns something else in its `first` steps, counted from there."""
    return recipe.warn(step - first, values)


def read_start(
    config: Config, workdir: Workdir, given: Collection[str] = ()
) -> tuple[Config, sources.Source | None]:
    """The config with what its vocabulary file and its weights tell, and the weights of
    `config.init_from` if this start needs them; refused before any long work.

    Args:
      given: paths of fields that were asked for by name, "model.layers" for one. They stay, and
        are an error where file or weights contradict; other sizes follow these.

    Raises:
      UserError: no such file or weights, or some that do not fit.
    """
    workdir.data(config)
    config = dataclasses.replace(config, tokenizer=follow_file(config.tokenizer, given))
    config = teaching.follow(config, workdir, given)
    if not config.init_from:
        return config, None
    begun = workdir.is_bound()
    if begun and workdir.config.exists():
        return _as_begun(config, workdir, given), None
    source = sources.read_source(config.init_from)
    config = importing.follow_source(config, source, given)
    return config, None if begun else source


def _as_begun(config: Config, workdir: Workdir, given: Collection[str]) -> Config:
    """`config` with the vocabulary and the sizes that the run in `workdir` took of its weights,
    which need not be there any more.
    """
    kept = workdir.read_config()
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


def _publish(config: Config, workdir: Workdir, prepared: corpus.Corpus, step: int, params):
    """Writes WORKDIR/huggingface/step-N, to be uploaded as a revision."""
    params = sharding.gather(params)
    if jax.process_index() == 0:
        conversion.write_huggingface(
            workdir.export("huggingface", step),
            split(config, params),
            (prepared.tokenizer, config.tokenizer),
            title=config.name,
            step=step,
            compare=False,
        )


def _conclude(config, workdir, prepared, result: loop.Result, mesh) -> PretrainingResult:
    """What the run came to; draws its curves if there is time for it."""
    writer = jax.process_index() == 0
    curves, report = None, ""
    if writer and not result.interrupted:  # a machine that is taken away gives little time
        with jax.set_mesh(mesh):
            example = _take_apart(config, prepared, result.state.params)
        title = f"{config.name}, step {result.step:,}"
        if pretraining_report.plot_curves(workdir.metrics, workdir.curves, title):
            curves = workdir.curves
        report = _describe(config, title, result, curves, example)
    return PretrainingResult(
        folder=workdir.path,
        step=result.step,
        metrics=reporting.read_metrics(workdir.metrics) if writer else [],
        evaluation=result.evaluation,
        interrupted=result.interrupted,
        curves=curves,
        report=report,
    )


def _describe(config, title: str, result: loop.Result, curves, example: list[str]) -> str:
    """What the run has learned, for a person."""
    report = [f"{title}, on held-out text:"]
    if result.evaluation:
        numbers = pretraining_report.describe_numbers(
            result.evaluation, config.tokenizer.vocab_size
        )
        report += [f"  {line}" for line in numbers]
    report += ["", *example] if example else []
    report += [
        "",
        (f"Curves: {curves}. " if curves else "")
        + "The same command goes on from here; for more steps add "
        f"--config.train.steps={2 * result.step}.",
        "Your own text: add --config.data.source='text:FOLDER/*.txt' --workdir=runs/mine",
    ]
    return "\n".join(report)


def _take_apart(config: Config, prepared: corpus.Corpus, params) -> list[str]:
    """Held-out rows after the generator, as the discriminator sees them; the first one in full."""
    if config.recipe != "replaced_token" or jax.process_count() > 1:
        return []
    graphdef, _ = build(RECIPES[config.recipe].model, config)

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
            special=prepared.tokenizer.special,
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
