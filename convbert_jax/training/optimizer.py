"""AdamW, Adafactor, Muon or a factory of the user's own, as `OptimizerSection` describes them.

The order is the release's (model/optimization.py): clip by global norm, Adam, decoupled decay, then
the learning rate. Steps count from 0, before the update. The state has one structure for every
setting of a method, so a run may change its other optimizer fields and go on.
"""

import inspect
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from convbert_jax.config import OptimizerSection, PluginError
from convbert_jax.config.checks import plugins
from convbert_jax.training.muon import scale_by_muon
from convbert_jax.training.state import flatten, parameter_path

# In the release variables with LayerNorm, layer_norm or bias in their name: the same ones.
_NEVER_DECAYED = re.compile(r"(^|_|/)(bias|scale)$")
_EMBEDDING = re.compile(r"(^|/)embedding$")
_STAGE = re.compile(r"encoder/stages/(\d+)/")


def make_optimizer(section: OptimizerSection, steps: int) -> optax.GradientTransformation:
    """The whole update, learning rate included.

    Args:
      steps: length of the run, which the schedule decays over.

    Raises:
      PluginError: as `check_method`.
    """
    if ":" in section.method:
        return optax.chain(_clip(section), _make_own(section, make_schedule(section, steps)))
    return optax.chain(
        *_direction(section), optax.scale_by_learning_rate(make_schedule(section, steps))
    )


def make_told_optimizer(
    section: OptimizerSection, layer_decay: float
) -> optax.GradientTransformationExtraArgs:
    """The whole update for runs that share a program: told its `learning_rate` at each step, which
    `layer_multipliers` then lower by depth.
    """
    if ":" in section.method:
        return _make_told_own(section, layer_decay)
    direction = optax.chain(*_direction(section))

    def update(gradients, state, params, *, learning_rate, **_):
        updates, state = direction.update(gradients, state, params)
        rates = layer_multipliers(params, layer_decay)
        return jax.tree.map(lambda u, rate: -learning_rate * rate * u, updates, rates), state

    return optax.GradientTransformationExtraArgs(direction.init, update)


def check_method(section: OptimizerSection) -> None:
    """Makes a plug-in optimizer once, to fail before any long work.

    Raises:
      PluginError: the user did not name it, it cannot be imported, or it does not take what the
        section sets.
    """
    if ":" in section.method:
        _make_own(section, 0.0)


def _make_own(
    section: OptimizerSection, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Calls the factory config.optimizer.method with the arguments that its signature has."""
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
            f"{field} cannot be made ({plugins.first_line(error)}); name a function that makes an "
            f"optax.GradientTransformation of some of the arguments {', '.join(offered)}.",
            field="config.optimizer.method",
            value=section.method,
        ) from error
    if not isinstance(made, optax.GradientTransformation):
        raise PluginError(
            f"{field} returns a {type(made).__name__}; let it return an "
            "optax.GradientTransformation.",
            field="config.optimizer.method",
            value=section.method,
        )
    if "learning_rate" not in taken:
        raise PluginError(
            f"{field} takes no argument learning_rate, so the schedule would have no effect; add "
            "one.",
            field="config.optimizer.method",
            value=section.method,
        )
    if section.weight_decay and "weight_decay" not in taken:
        raise PluginError(
            f"{field} takes no argument weight_decay, so config.optimizer.weight_decay="
            f"{section.weight_decay} would have no effect; set it to 0.",
            field="config.optimizer.weight_decay",
            value=section.weight_decay,
        )
    return made


def _make_told_own(
    section: OptimizerSection, layer_decay: float
) -> optax.GradientTransformationExtraArgs:
    """Makes the plug-in optimizer in each trace, with the traced learning rate of the step."""

    def make(learning_rate):
        return optax.chain(_clip(section), _make_own(section, learning_rate))

    def update(gradients, state, params, *, learning_rate, **_):
        updates, state = make(learning_rate).update(gradients, state, params)
        rates = layer_multipliers(params, layer_decay)
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


def layer_multipliers(params, decay: float):
    """Learning rate of each parameter relative to the head's, as in the releases of ELECTRA and
    ConvBERT (`model/optimization.py`).

    decay^(n + 2 - depth) for an encoder of n layers: depth 0 for the embeddings and their
    projection, i + 1 for layer i, n + 2 for the head. As in the release there is no depth n + 1:
    the last layer has decay^2.

    Args:
      params: under `embeddings/`, `encoder/` and `head/`; a stage has its layers along axis 0.

    Returns:
      a tree like `params` of numpy scalars, for a stage of arrays that broadcast to the parameter.
    """
    shapes = flatten(params)
    stages = {}
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
    section: OptimizerSection, steps: int, *, warmup_steps: float | None = None
) -> optax.Schedule:
    """Learning rate by step.

    Linear warm-up from 0, times a decay from 1 to `decay_to`, which is reached after the last step,
    along a line or half a cosine. The decay begins when the warm-up ends, or at step 0 with
    `decay_during_warmup`: peak * (1 - step / steps) * min(1, step / warmup_steps) in the release.
    Or times sqrt(warmup_steps / step) from the end of the warm-up on (Vaswani et al. 2017, §5.3,
    whose rate is peak = 1 / sqrt(hidden_size * warmup_steps)), or times 1.

    Args:
      warmup_steps: instead of the section's; not a whole number in the release's fine-tuning.
    """
    warmup = section.warmup_steps if warmup_steps is None else warmup_steps
    start = 0 if section.decay_during_warmup else warmup

    def schedule(step):
        step = jnp.asarray(step, jnp.float32)
        if section.schedule == "inverse_sqrt":
            begun = max(warmup, 1.0)  # fine-tuning of few steps has no warm-up
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


def scale_by_adafactor() -> optax.GradientTransformation:
    """Adafactor without momentum (Shazeer & Stern 2018, algorithm 4): the second moment, factored
    where a matrix has 128 rows and columns or more, updates clipped at a root mean square of 1 and
    scaled by that of the parameter, at least 1e-3.
    """
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
    )


def scale_by_uncorrected_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without bias correction: m / (sqrt(v) + eps).

    The first updates are about (1 - b1) / sqrt(1 - b2) = 3.2 times larger than corrected ones,
    which the warm-up hides. State as of `optax.scale_by_adam`.
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
    """True where weight decay applies: not biases, not layer norms, embeddings by choice."""

    def decays(path, _):
        name = parameter_path(path)
        if _NEVER_DECAYED.search(name):
            return False
        return decay_embeddings or not _EMBEDDING.search(name)

    return jax.tree_util.tree_map_with_path(decays, params)
