"""AdamW, Adafactor, Muon or a user's optimizer factory, configured by `OptimizerSection`.

The order follows the official code (model/optimization.py): clip by global norm, Adam, decoupled
weight decay, learning rate. The first update has step 0. The structure of the state depends on the
method only, so a resumed run may change the other optimizer fields.
"""

import inspect
import re
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from convbert_jax.config import OptimizerSection, PhaseSection, PluginError, plugins
from convbert_jax.training.partitioning import flatten_params, parameter_path

# The same variables as in the official code: LayerNorm, layer_norm or bias in their name.
_NEVER_DECAYED = re.compile(r"(^|_|/)(bias|scale)$")

_EMBEDDING = re.compile(r"(^|/)embedding$")

_STAGE = re.compile(r"encoder/stages/(\d+)/")


def make_optimizer(
    section: OptimizerSection, steps: int, phases: Sequence[PhaseSection] = ()
) -> optax.GradientTransformation:
    """Makes the complete update, including the learning rate.

    Args:
      steps: length of the run and of the schedule.
      phases: see `make_schedule`.

    Raises:
      PluginError: as `check_method`.
    """
    schedule = make_schedule(section, steps, phases)
    if ":" in section.method:
        return optax.chain(_clip(section), _make_plugin(section, schedule))
    return optax.chain(*_direction(section), optax.scale_by_learning_rate(schedule))


def make_injected_lr_optimizer(
    section: OptimizerSection, layer_decay: float, depths: Sequence[int] = ()
) -> optax.GradientTransformationExtraArgs:
    """Makes the complete update for runs that share a program.

    The learning rate is the extra argument `learning_rate` of `update`; `layer_multipliers` scale
    it by depth.

    Args:
      depths: see `layer_multipliers`.
    """
    if ":" in section.method:
        return _make_injected_lr_plugin(section, layer_decay, depths)
    direction = optax.chain(*_direction(section))

    def update(gradients, state, params, *, learning_rate, **_):
        updates, state = direction.update(gradients, state, params)
        rates = layer_multipliers(params, layer_decay, depths)
        return jax.tree.map(lambda u, rate: -learning_rate * rate * u, updates, rates), state

    return optax.GradientTransformationExtraArgs(direction.init, update)


def check_method(section: OptimizerSection) -> None:
    """Constructs a plug-in optimizer once, so that its errors occur before expensive work.

    Raises:
      PluginError: the plug-in is not allowed, cannot be imported, or lacks an argument that the
        section sets.
    """
    if ":" in section.method:
        _make_plugin(section, 0.0)


def _make_plugin(
    section: OptimizerSection, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Calls the factory config.optimizer.method with the arguments in its signature."""
    field = f"config.optimizer.method={section.method}"
    factory = plugins.load(section.method, "config.optimizer.method")
    offered = {
        "learning_rate": learning_rate,
        "b1": section.beta1,
        "b2": section.beta2,
        "eps": section.epsilon,
        "weight_decay": section.weight_decay,
        "mask": partial(decay_mask, decay_embeddings=section.decay_embeddings),
    }
    try:
        taken = offered.keys() & inspect.signature(factory).parameters.keys()
        made = factory(**{name: offered[name] for name in taken})
    except Exception as error:
        raise PluginError(
            f"{field} failed: {plugins.first_line(error)}. Name a function that returns an "
            f"optax.GradientTransformation and takes some of the arguments {', '.join(offered)}.",
            field="config.optimizer.method",
            value=section.method,
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise PluginError(
            f"{field} returned a {type(made).__name__}. It must return an "
            "optax.GradientTransformation.",
            field="config.optimizer.method",
            value=section.method,
        )
    if "learning_rate" not in taken:
        raise PluginError(
            f"{field} has no argument learning_rate, so the schedule would have no effect. Add "
            "one.",
            field="config.optimizer.method",
            value=section.method,
        )
    if section.weight_decay and "weight_decay" not in taken:
        raise PluginError(
            f"{field} has no argument weight_decay, so config.optimizer.weight_decay="
            f"{section.weight_decay} would have no effect. Set it to 0.",
            field="config.optimizer.weight_decay",
            value=section.weight_decay,
        )
    return made


def _make_injected_lr_plugin(
    section: OptimizerSection, layer_decay: float, depths: Sequence[int]
) -> optax.GradientTransformationExtraArgs:
    """Constructs the plug-in optimizer in each trace, with the step's traced learning rate."""

    def make(learning_rate):
        return optax.chain(_clip(section), _make_plugin(section, learning_rate))

    def update(gradients, state, params, *, learning_rate, **_):
        updates, state = make(learning_rate).update(gradients, state, params)
        rates = layer_multipliers(params, layer_decay, depths)
        return jax.tree.map(lambda u, rate: rate * u, updates, rates), state

    return optax.GradientTransformationExtraArgs(make(0.0).init, update)


def _clip(section: OptimizerSection) -> optax.GradientTransformation:
    clips = section.clip_norm and section.release_replicas == 1  # replicas clip before their sum
    return optax.clip_by_global_norm(section.clip_norm) if clips else optax.identity()


def _direction(section: OptimizerSection) -> list[optax.GradientTransformation]:
    if section.method == "adafactor":
        scale = scale_by_adafactor()
    else:
        adam = optax.scale_by_adam if section.bias_correction else scale_by_uncorrected_adam
        scale = adam(b1=section.beta1, b2=section.beta2, eps=section.epsilon)
        if section.method == "muon":
            scale = scale_by_muon(scale)
    return [
        _clip(section),
        scale,
        optax.add_decayed_weights(
            section.weight_decay, mask=lambda params: decay_mask(params, section.decay_embeddings)
        ),
    ]


def layer_multipliers(params, decay: float, depths: Sequence[int] = ()):
    """Computes each parameter's learning rate relative to the head's, by depth.

    The multiplier is decay^(n + 2 - depth) for an encoder of n layers: depth 0 for the embeddings
    and their projection, i + 1 for layer i, n + 2 for the head. As in the official code of ELECTRA
    and ConvBERT (`model/optimization.py`), depth n + 1 is unused: the last layer has decay^2.

    Args:
      params: tree with `embeddings/`, `encoder/` and `head/`; stages have layers along axis 0.
      decay: ratio between adjacent layers.
      depths: number of layers of each stage, needed if `params` lack a stage, as with LoRA.

    Returns:
      A tree like `params` of float32 scalars; for stages, arrays that broadcast to the parameter.
    """
    shapes = flatten_params(params)
    stages = dict(enumerate(depths))
    for path, leaf in shapes.items():
        match = _STAGE.match(path)
        if match:
            stages[int(match[1])] = leaf.shape[0]
    first = {stage: sum(stages[s] for s in stages if s < stage) for stage in stages}
    top = sum(stages.values()) + 2

    def multiplier(path, leaf):
        name = parameter_path(path)
        match = _STAGE.match(name)
        if match:
            depths = first[int(match[1])] + 1 + np.arange(leaf.shape[0])
            depths = depths.reshape(-1, *[1] * (leaf.ndim - 1))
        else:
            depths = np.asarray(top if name.startswith("head/") else 0)
        return (decay ** (top - depths)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(multiplier, params)


def make_schedule(
    section: OptimizerSection,
    steps: int,
    phases: Sequence[PhaseSection] = (),
    *,
    warmup_steps: float | None = None,
) -> optax.Schedule:
    """Makes the learning-rate schedule: linear warmup from 0, times one of these factors.

    - "linear", "cosine": from 1 to `decay_to` at `steps`, starting after the warmup, or at step 0
      with `decay_during_warmup`. The official code uses
      peak * (1 - step / steps) * min(1, step / warmup_steps).
    - "inverse_sqrt": sqrt(warmup_steps / step) after the warmup (Vaswani et al. 2017, §5.3, with
      peak = 1 / sqrt(hidden_size * warmup_steps)).
    - "constant": 1.

    With phases, the factor is that of the phase: constant, or from the phase's learning rate to
    `decay_to` at its end, linear or by 1 - sqrt(progress) (Hägele et al. 2024, §3).

    Args:
      steps: length of the run.
      phases: phases with lengths in steps; they replace `section.schedule`.
      warmup_steps: overrides the section's; can be fractional, as in the official fine-tuning.
    """
    warmup = section.warmup_steps if warmup_steps is None else warmup_steps
    start = 0 if section.decay_during_warmup else warmup

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        if phases:
            decayed = _factor_of_phases(section, phases, step)
        elif section.schedule == "inverse_sqrt":
            begun = max(warmup, 1.0)  # short fine-tuning has no warmup
            decayed = jnp.sqrt(begun / jnp.maximum(step, begun))
        elif section.schedule == "constant":
            decayed = 1.0
        else:
            progress = jnp.clip((step - start) / max(1, steps - start), 0.0, 1.0)
            if section.schedule == "cosine":
                progress = (1.0 - jnp.cos(jnp.pi * progress)) / 2.0
            decayed = 1.0 - (1.0 - section.decay_to) * progress
        return section.learning_rate * decayed * jnp.minimum(1.0, step / warmup if warmup else 1.0)

    return schedule


def restart_schedule(opt_state: optax.OptState) -> optax.OptState:
    """Sets the step of the learning-rate schedule in an optimizer state to 0."""

    def restart(state):
        if not isinstance(state, optax.ScaleByScheduleState):
            return state
        zero = jax.device_put(np.zeros_like(state.count), state.count.sharding)
        return state._replace(count=zero)

    is_schedule = lambda state: isinstance(state, optax.ScaleByScheduleState)  # noqa: E731
    return jax.tree.map(restart, opt_state, is_leaf=is_schedule)


def _factor_of_phases(
    section: OptimizerSection, phases: Sequence[PhaseSection], step: jax.Array
) -> jax.Array:
    factor, end = jnp.ones(()), 0
    for phase in phases:
        begin, end = end, end + phase.length
        peak = (phase.learning_rate or section.learning_rate) / section.learning_rate
        progress = jnp.clip((step - begin) / phase.length, 0.0, 1.0)
        left = {"constant": 1.0, "linear": 1.0 - progress, "1-sqrt": 1.0 - jnp.sqrt(progress)}
        value = section.decay_to + (peak - section.decay_to) * left[phase.schedule]
        value = peak if phase.schedule == "constant" else value
        factor = jnp.where(step >= begin, value, factor)
    return factor


def scale_by_adafactor() -> optax.GradientTransformation:
    """Adafactor without momentum (Shazeer & Stern 2018, algorithm 4).

    The second moment is factored for matrices of at least 128 x 128. Updates are clipped to an RMS
    of 1 and multiplied by the RMS of the parameter, at least 1e-3.
    """
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def scale_by_uncorrected_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without bias correction: m / (sqrt(v) + eps).

    The first updates are about (1 - b1) / sqrt(1 - b2) = 3.2 times as large as corrected ones,
    which warmup compensates. The state is that used by `optax.scale_by_adam`.
    """

    def update(gradients, state, params=None):
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, gradients)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, gradients)
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        count = optax.safe_increment(state.count)
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformation(optax.scale_by_adam().init, update)


def decay_mask(params, decay_embeddings: bool):
    """Returns a mask tree: True except for biases, layer norms and, optionally, embeddings."""

    def decays(path, _):
        name = parameter_path(path)
        if _NEVER_DECAYED.search(name):
            return False
        return decay_embeddings or not _EMBEDDING.search(name)

    return jax.tree_util.tree_map_with_path(decays, params)


# Matrices between hidden states; leading axes are layers and groups.
MATRIX = re.compile(r"(^|/)stages/.*/(kernel|pointwise|conv_kernel)$")

_MUON_UPDATE_RMS = 0.2  # typical RMS of Adam's updates, which Muon's are scaled to


def scale_by_muon(adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Muon (Jordan et al. 2024): Nesterov momentum 0.95, orthogonalized by 5 Newton-Schulz steps.

    Updates are multiplied by 0.2 sqrt(max(inputs, outputs)), so learning rates and weight decay of
    Adam can be reused (Liu et al. 2025, §2.2).

    Args:
      adam: transformation of all other parameters: embeddings, heads, vectors, depthwise filters.
    """
    matrices = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_muon_dimensions),
        optax.stateless(lambda updates, params: jax.tree.map(_resize, updates)),
    )
    return optax.chain(optax.masked(matrices, muon_mask), optax.masked(adam, _find_others))


def muon_mask(params):
    """Returns a mask tree: True for parameters that Muon updates."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: bool(MATRIX.search(parameter_path(path))), params
    )


def _find_others(params):
    return jax.tree.map(lambda found: not found, muon_mask(params))


def _muon_dimensions(params):
    return jax.tree.map(
        lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1), params
    )


def _resize(update: jax.Array) -> jax.Array:
    return _MUON_UPDATE_RMS * max(update.shape[-2:]) ** 0.5 * update
