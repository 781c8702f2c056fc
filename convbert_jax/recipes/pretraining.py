"""One long run: pre-training, and training of models that write text."""

import functools
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from flax import nnx

from convbert_jax.analysis import pretraining_report
from convbert_jax.config import Config, UserError, network
from convbert_jax.data.corpus import batching
from convbert_jax.data.corpus.corpus import Corpus
from convbert_jax.data.tokenizer.tokenizer import Tokenizer
from convbert_jax.inference.writing.reading import read_mean
from convbert_jax.interop import conversion
from convbert_jax.interop.networks import MODELS, outline, split
from convbert_jax.models.build import build
from convbert_jax.objectives import replaced_token
from convbert_jax.recipes import evaluation, prepared, start, tasks, teaching
from convbert_jax.recipes.prepared import Data
from convbert_jax.recipes.results import PretrainingResult
from convbert_jax.recipes.writing import scoring
from convbert_jax.training import loop, sharding
from convbert_jax.training.environment import compilation, devices
from convbert_jax.training.reports import reporting
from convbert_jax.workdir import Workdir


def prepare(config: Config, folder: epath.PathLike, given: Collection[str] = ()) -> None:
    """Makes tokenizer and shards for `config` in the workdir `folder`, or finds them there.

    Args:
      given: as `start.read_start` takes it.
    """
    workdir = Workdir(folder)
    config, _ = start.read_start(config, workdir, given)
    prepared.prepare(config, workdir.data(config))


def pretrain(
    config: Config, folder: epath.PathLike, given: Collection[str] = ()
) -> PretrainingResult:
    """Pre-trains in the workdir `folder`, resuming what is there.

    Args:
      given: as `start.read_start` takes it.

    Raises:
      UserError: what cannot be used, or gave out; see the kinds of it and `loop.train`.
    """
    found = devices.find_devices(config)
    mesh = sharding.make_mesh(config.mesh, found)
    prepared.check_batches(config, mesh)
    workdir = Workdir(folder)
    config, source = start.read_start(config, workdir, given)
    if config.reads_pairs and scoring.can_score():
        scoring.check(config, tests=False)
    if config.recipe == "span_corruption" and not config.tokenizer.path:
        tasks.check_sentinels(config, config.tokenizer.sentinels)
    teacher = teaching.open_teacher(config)
    if teacher and config.distillation.initialize and not workdir.is_bound():
        source = teaching.start_of(config, teacher)
    writer = jax.process_index() == 0
    with devices.random_numbers(found), workdir.open(config, writer=writer):
        devices.print_config(config, leave_out=("finetune", "task", "outputs", *_idle(config)))
        teaching.bind(workdir, config, teacher, writer=writer)
        if idle := network.idle_fields(config.model):
            logging.info(
                "%s say nothing here: each stage has its own, or a mixer that does not read them.",
                ", ".join(f"config.model.{f}={getattr(config.model, f)}" for f in idle),
            )
        if not config.writes_text:
            _tell_of_encoder(config)
        data = prepared.open_data(config, workdir)
        task = tasks.build_task(
            config,
            data.tokenizer.special,
            found[0],
            teacher,
            tokenizer=data.tokenizer,
            effort=data.effort(mesh),
        )
        result = loop.train(
            task,
            config,
            workdir=workdir,
            mesh=mesh,
            batches=data.training(mesh),
            evaluation=data.heldout(mesh),
            initial_params=functools.partial(start.fill, config, source) if source else None,
            publish=functools.partial(_publish, config, workdir, data.tokenizer),
        )
        return _conclude(config, workdir, data, result, mesh)


def _idle(config: Config) -> tuple[str, ...]:
    """Sections that the recipe does not read."""
    if not config.writes_text:
        return "sequence", "parallel", "decoding"
    return "generator", "distillation", *(() if config.reads_pairs else ("parallel",))


def _tell_of_encoder(config: Config) -> None:
    """What the log says of an encoder's run at its start."""
    networks = outline(config)
    if networks["main"].masked:
        logging.info(
            "The convolutions read no padding. Hugging Face's class reads it: for padded "
            "batches there, train with --config.model.mask_convolution=false "
            "--config.data.layout=electra instead."
        )
    if first := config.objective.masked_lm_steps:
        logging.info(
            "Steps 1 to %d train the encoder on masked words, those from %d on on replaced tokens.",
            first,
            first + 1,
        )
    if config.checkpoint.huggingface_every:
        conversion.check_expressible(networks)


def _publish(config: Config, workdir: Workdir, tokenizer: Tokenizer, step: int, params):
    """Writes WORKDIR/huggingface/step-N, to be uploaded as a revision."""
    params = sharding.gather(params)
    if jax.process_index() == 0:
        conversion.write_huggingface(
            workdir.export("huggingface", step),
            split(config, params),
            (tokenizer, config.tokenizer),
            title=config.name,
            step=step,
            compare=False,
        )


def _conclude(config, workdir, data: Data, result: loop.Result, mesh) -> PretrainingResult:
    """What the run came to; draws its curves if there is time for it."""
    writer = jax.process_index() == 0
    curves, report, sets = None, "", []
    if writer and not result.interrupted:  # a machine that is taken away gives little time
        with jax.set_mesh(mesh):
            example = _take_apart(config, data.corpus, result.state.params)
        title = f"{config.name}, step {result.step:,}"
        if pretraining_report.plot_curves(workdir.metrics, workdir.curves, title):
            curves = workdir.curves
        if config.reads_pairs:
            sets, example = _write_and_score(config, workdir, data, result)
        report = _describe(config, title, result, curves, example)
    return PretrainingResult(
        folder=workdir.path,
        step=result.step,
        metrics=reporting.read_metrics(workdir.metrics) if writer else [],
        evaluation=result.evaluation,
        interrupted=result.interrupted,
        curves=curves,
        report=report,
        scores=scoring.values_of(sets),
    )


def _write_and_score(
    config: Config, workdir: Workdir, data: Data, result: loop.Result
) -> tuple[list[scoring.Set], list[str]]:
    """What the model writes to the held-out pairs, and lines of it for the report. What keeps it
    from that is said there: the run itself is done.
    """
    if not scoring.can_score():
        return [], [scoring.NOT_SCORED]
    file = workdir.evaluation(result.step)
    try:
        params = sharding.gather(result.state.params)
        if config.decoding.average > 1:
            _, params = read_mean(workdir, config, result.step)
        with compilation.explain_out_of_memory(evaluation.LESS_TO_WRITE):
            sets = scoring.score_sets(
                config,
                params,
                data.tokenizers,
                data.pairs,
                evaluation.texts_folder(file),
                tests=False,
            )
    except UserError as error:
        logging.warning("Nothing was written and scored: %s", error)
        return [], [f"Nothing was written and scored: {error}"]
    evaluation.write_numbers(workdir, result.step, result.evaluation, file, sets)
    return sets, scoring.describe(sets)


def _describe(config, title: str, result: loop.Result, curves, example: list[str]) -> str:
    """What the run has learned, for a person."""
    report = [f"{title}, on held-out text:"]
    if result.evaluation:
        numbers = pretraining_report.describe_numbers(result.evaluation, config.vocabularies[1])
        report += [f"  {line}" for line in numbers]
    report += ["", *example] if example else []
    report += [
        "",
        (f"Curves: {curves}. " if curves else "")
        + "The same command goes on from here; for more steps add "
        f"--config.train.steps={2 * result.step}.",
        _name_own_text(config),
    ]
    return "\n".join(report)


def _name_own_text(config: Config) -> str:
    own, what = "--config.data.source='text:FOLDER/*.txt'", "text"
    if config.reads_pairs:
        own, what = "--config.parallel.source=parallel:FILE,FILE", "pairs"
    return f"Your own {what}: add {own} --workdir=runs/mine"


def _take_apart(config: Config, corpus: Corpus | None, params) -> list[str]:
    """Held-out rows after the generator, as the discriminator sees them; the first one in full."""
    if config.recipe != "replaced_token" or jax.process_count() > 1:
        return []
    graphdef, _ = build(MODELS[config.recipe], config)

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
            special=corpus.tokenizer.special,
        )[-1]
        ids, types = batch["segment_ids"], batch["type_ids"]
        return corrupted, model.discriminate(corrupted, ids, types, dtype=jnp.float32, key=None)

    batch = next(batching.evaluation_batches(corpus, batch_size=32, rows=32))
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
            pieces = corpus.tokenizer.pieces
            lines = pretraining_report.mark_replaced(pieces(new), pieces(old), suspects)
    return [
        "A held-out text: [new<old] was put in by the generator, ! marks as many subwords as were",
        "replaced, those that the discriminator suspects most:",
        *(f"  {line}" for line in lines),
        f"Over 32 such rows {found / max(1, replaced):.0%} of its suspects are new; by chance "
        f"{replaced / max(1, tokens):.0%}.",
    ]
