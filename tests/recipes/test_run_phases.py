"""config.phases: schedule, rows, batches, masks and weights by phase; resume; second decays."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import convbert_jax
from convbert_jax import recipes
from convbert_jax.analysis.verify_resume import compare
from convbert_jax.config import ConfigError, PhaseSection, SourceSection, UserError, lengths
from convbert_jax.interop import sources
from convbert_jax.interop.networks import ConversionError, split
from convbert_jax.training import optimizer
from convbert_jax.training.checkpoints import by_name, load_arrays
from convbert_jax.workdir import Workdir
from tests.refusals import refused
from tests.runs import make_config

PHASES = (
    PhaseSection("stable", 3),
    PhaseSection(
        "long",
        2,
        weights=(0.25, 0.75),
        row_length=64,
        batch_size=4,
        mask_fraction=0.3,
        rotary_base=1e5,
    ),
    PhaseSection("decay", 3, "1-sqrt", weights=(0.5, 0.5)),
)


def make(text, folder, **fields):
    numbers = folder / "numbers.txt"
    numbers.write_text(
        "\n\n".join(f"Number {n} and {n + 1} are neighbors of {n + 2}." for n in range(300))
    )
    given = {
        "recipe": "masked_lm",
        "phases": PHASES,
        "data__mixture": (
            SourceSection("domain", text, weight=0.75),
            SourceSection("numbers", f"text:{numbers}", weight=0.25),
        ),
        "model__positions": 64,
        "model__position_embedding": "rotary",
        "train__batch_size": 8,
        "train__log_every": 1,
        "train__eval_every": 100,
        "train__eval_rows": 8,
        "checkpoint__every": 1,
        "checkpoint__keep": 20,
        "optimizer__warmup_steps": 2,
        "optimizer__learning_rate": 1e-3,
    }
    return make_config(**given | fields)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("phases")
    config = make(text, folder)
    return config, recipes.pretrain(config, folder / "run")


def test_each_phase_has_its_values(finished):
    _, run = finished
    assert run.step == 8
    assert Workdir(run.folder).read_config().train.steps == 8
    train = [line for line in run.metrics if line["split"] == "train"]
    rates = [line["learning_rate"] * 1e3 for line in train]
    decay = [1 - (n / 3) ** 0.5 for n in range(3)]
    assert rates == pytest.approx([0, 0.5, 1, 1, 1, *decay])
    assert [line["tokens"] for line in train] == [256 * n for n in range(1, 9)]
    assert [train[n]["domain/share"] * rows % 1 for n, rows in ((3, 4), (4, 8))] == [0, 0]
    assert "phase long" in run.report
    assert "config.train.steps=" not in run.report  # phases are fixed
    assert "config.data.source=" not in run.report  # its text is not a built-in corpus


def test_it_resumes_exactly(finished, tmp_path):
    """From a checkpoint at the edge of a phase, and from one inside."""
    config, run = finished
    for step in (3, 4):
        folder = tmp_path / str(step)
        shutil.copytree(run.folder, folder)
        for later in range(step + 1, 9):
            shutil.rmtree(folder / "checkpoints" / str(later))
        again = recipes.pretrain(config, folder)
        for later in (step + 1, 8):
            arrays = (load_arrays(Workdir(r.folder).checkpoints, later)[1] for r in (run, again))
            assert compare(*arrays) == []


def test_a_checkpoint_is_evaluated_as_its_phase_logged_it(finished):
    _, run = finished
    (logged,) = (line for line in run.metrics if (line["split"], line["step"]) == ("validation", 5))
    values = recipes.evaluate(Workdir(run.folder).read_config(), run.folder, step=5).values
    assert values["mlm_loss"] == pytest.approx(logged["mlm_loss"], rel=1e-6)


def test_checkpoints_are_averaged(finished, tmp_path):
    config, run = finished
    workdir, config = Workdir(run.folder), Workdir(run.folder).read_config()
    steps = workdir.steps()
    parts = [sources.read_params(workdir, config, step)[1] for step in steps[-3:]]
    mean = jax.tree.map(lambda *leaves: np.mean(leaves, 0, dtype=np.float64), *parts)
    found = sources.read_source(f"{run.folder}@average=3")
    assert found.step == steps[-1]
    expected = split(config, mean)["main"].parameters
    for read in (found.networks, convbert_jax.load(run.folder, average=3).networks):
        for name, array in read["main"].parameters.items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-9)
    file = tmp_path / "mean.json"
    values = recipes.evaluate(config, run.folder, average=3, output=str(file)).values
    assert json.loads(file.read_text())["checkpoints"] == steps[-3:]
    assert values["mlm_loss"] != run.evaluation["mlm_loss"]
    for read in (
        lambda count: sources.read_source(f"{run.folder}@average={count}"),
        lambda count: convbert_jax.load(run.folder, average=count),
        lambda count: recipes.evaluate(config, run.folder, average=count),
    ):
        with refused(UserError, field="average", value=len(steps) + 1):
            read(len(steps) + 1)


def test_a_second_decay_starts_from_the_end_of_a_phase(finished, tmp_path):
    config, run = finished
    second = dataclasses.replace(
        config,
        init_from=f"{run.folder}@stable",
        phases=(dataclasses.replace(PHASES[2], learning_rate=5e-4),),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=0),
        data=dataclasses.replace(
            config.data, directory=str(Workdir(run.folder).data(config) / ".." / "second")
        ),
    )
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        train = recipes.pretraining.loop.train

        def look(segments, config, *, initial_params, initial_opt_state, **options):
            seen.append(jax.device_get(initial_params()))

            def read(abstract):
                found = initial_opt_state(abstract)
                seen.append(jax.device_get(found))  # a copy: training donates the state
                return found

            return train(
                segments,
                config,
                initial_params=initial_params,
                initial_opt_state=read,
                **options,
            )

        patch.setattr(recipes.pretraining.loop, "train", look)
        result = recipes.pretrain(second, tmp_path / "second")
    _, arrays = load_arrays(Workdir(run.folder).checkpoints, 3)
    params = by_name({"params": seen[0]})
    assert all(np.array_equal(params[name], arrays[name]) for name in params)
    kept = [a for name, a in sorted(arrays.items()) if "/mu/" in name]
    moments = [x for x in jax.tree.leaves(optimizer_moments(seen[1])) if x.ndim]
    assert sorted(np.abs(a).sum() for a in kept) == pytest.approx(
        sorted(float(np.abs(x).sum()) for x in moments)
    )
    train = [line for line in result.metrics if line["split"] == "train"]
    assert train[0]["learning_rate"] == pytest.approx(5e-4)
    with refused(ConversionError, "stable, long, decay", value="other"):
        recipes.pretrain(
            dataclasses.replace(second, init_from=f"{run.folder}@other"), tmp_path / "third"
        )


def optimizer_moments(state):
    return [part.mu for part in jax.tree.leaves(state, is_leaf=lambda s: hasattr(s, "mu"))
            if hasattr(part, "mu")]  # fmt: skip


def test_plans_price_all_phases(finished):
    _, run = finished
    kept = Workdir(run.folder).read_config()
    numbers = recipes.plan(kept, run.folder, topology="gpu:h100").numbers
    assert [numbers["phases"][p.name]["steps"] for p in PHASES] == [3, 2, 3]
    parts = [sum(part["hours"]) for part in numbers["phases"].values()]
    assert sum(numbers["hours"]) == pytest.approx(sum(parts))


def test_lengths_of_phases_use_their_own_batches():
    shares = make_config(
        train__steps="10k tokens",
        optimizer__warmup_steps="10%",
        phases=(
            PhaseSection("stable", "60%"),
            PhaseSection("decay", "40%", "linear", batch_size=4, row_length=16),
        ),
        train__batch_size=8,
    )
    found = lengths.to_steps(shares, lengths.tokens_of_step)
    assert [phase.length for phase in found.phases] == [23, 62]  # 6,000 / 256 and 4,000 / 64
    assert (found.train.steps, found.optimizer.warmup_steps) == (85, 8)
    assert lengths.to_steps(found, lengths.tokens_of_step) == found
    absolute = dataclasses.replace(
        shares, phases=(PhaseSection("stable", "2560 tokens"), PhaseSection("decay", 5))
    )
    assert lengths.to_steps(absolute, lengths.tokens_of_step).train.steps == 15


def test_the_schedule_of_phases_by_hand():
    section = make_config(optimizer__learning_rate=2.0, optimizer__decay_to=0.1).optimizer
    section = dataclasses.replace(section, warmup_steps=2)
    phases = (
        PhaseSection("a", 4),
        PhaseSection("b", 4, learning_rate=1.0),
        PhaseSection("c", 4, "linear"),
    )
    schedule = optimizer.make_schedule(section, 12, phases)
    wanted = [0, 1, 2, 2, 1, 1, 1, 1, 2, 1.55, 1.1, 0.65, 0.2]
    assert [float(schedule(step)) for step in range(13)] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("phases", "field"),
    [
        ([{"length": "60%"}, {"length": "50%"}], ""),
        ([{"length": "60%"}, {"length": 5}], ""),
        ([{"name": "b"}, {}], "[0].name"),
        ([{"length": 1, "weights": (1.0,)}, {"length": 1}], "[0].weights"),
        ([{"length": 1, "rotary_base": 1e5}, {"length": 1}], "[0].rotary_base"),
        ([{"length": 1, "row_length": 64}, {"length": 1}], ""),
        ([{"length": "3 hours"}, {"length": 1}], "[0].length"),
    ],
    ids=str,
)
def test_wrong_phases_are_refused(phases, field):
    given = zip("ab", phases, strict=True)
    sections = tuple(PhaseSection(**{"name": name, **fields}) for name, fields in given)
    with refused(ConfigError, field=f"config.phases{field}"):
        make_config(phases=sections)
