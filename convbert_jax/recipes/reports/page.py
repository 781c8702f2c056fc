"""report.html: one file without scripts or external resources, rendered by jinja2.

The templates escape every value, so HTML in a corpus, a config or a file name is shown as text.
"""

import dataclasses
import datetime
import functools
import platform
import re
from collections.abc import Callable, Collection, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jax
from absl import logging

import convbert_jax
from convbert_jax import drawing, files
from convbert_jax.config import Config, changes, to_dict, to_text
from convbert_jax.training.environment import devices
from convbert_jax.workdir import Workdir

if TYPE_CHECKING:
    import jinja2

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
# Control characters, unpaired surrogates and noncharacters, which HTML cannot contain.
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)


@dataclasses.dataclass(frozen=True)
class About:
    """Facts about a run that every page shows.

    Attributes:
      written: time of the page, in UTC.
      leave_out: sections ("data") and fields ("data.source") of the config that the recipe ignores.
      environment: name -> description of devices and versions.
    """

    written: datetime.datetime
    leave_out: Collection[str]
    environment: Mapping[str, str]


def describe(config: Config, mesh: jax.sharding.Mesh, leave_out: Collection[str]) -> About:
    """Collects the facts about a run that ends now on the devices of `mesh`."""
    found = list(mesh.devices.flat)
    environment = {
        "devices": devices.describe_devices(found),
        "mesh": ", ".join(f"{name} {size}" for name, size in mesh.shape.items()),
        "processes": str(jax.process_count()),
        "compute dtype": str(devices.compute_dtype(config, found[0])),
        "convbert_jax": convbert_jax.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        **{name: metadata.version(name) for name in _LIBRARIES},
    }
    return About(datetime.datetime.now(datetime.UTC), leave_out, environment)


def render(
    template: str, config: Config, about: About, *, state: str, resume: str = "", **values: Any
) -> str:
    """Renders a page.

    Args:
      template: name of a file in templates/.
      state: how far the run came.
      resume: command that resumes an interrupted run; "" if the run is finished.
      values: variables of the template.
    """
    changed, defaults = list_fields(config, about.leave_out)
    return _templates().get_template(template).render(
        config=config,
        about=about,
        state=state,
        resume=resume,
        processes=jax.process_count(),
        changed=changed,
        defaults=defaults,
        **values,
    )  # fmt: skip


def write(workdir: Workdir, make: Callable[[], str]) -> bool:
    """Writes WORKDIR/report.html.

    Any error becomes a warning, because the run itself is finished and saved.

    Args:
      make: returns the page.

    Returns:
      whether the file was written.
    """
    try:
        files.write_text(workdir.report, make())
    except Exception as error:
        logging.warning(
            "Cannot write %s (%s: %s); the run itself is saved.",
            workdir.report,
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return False
    return True


def list_fields(
    config: Config, leave_out: Collection[str]
) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Lists the fields of a config as an override spells them.

    Returns:
      changed: (name, value, default) of fields that differ from the defaults.
      defaults: (name, value) of all others.
    """
    default, own = to_dict(Config()), to_dict(config)
    different = changes.differences(default, own)
    changed, defaults = [], []
    for path, value in {**changes.flatten(own), **different}.items():
        if path in leave_out or path.partition(".")[0] in leave_out:
            continue
        name = f"config.{path}"
        if path in different:
            old, new = different[path]
            changed.append((name, _spell(new), _spell(old)))
        else:
            defaults.append((name, _spell(value)))
    return changed, defaults


def clean(text: str) -> str:
    """Normalizes line ends to newlines and replaces characters that HTML forbids by U+FFFD."""
    return _FORBIDDEN.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))


def _clean_value(value: Any) -> Any:
    is_plain = isinstance(value, str) and not hasattr(value, "__html__")
    return clean(value) if is_plain else value


@functools.cache
def _templates() -> "jinja2.Environment":
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__),
        autoescape=True,
        finalize=_clean_value,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["colors"] = drawing.COLORS
    return environment


def _spell(value: object) -> str:
    return to_text(tuple(value) if isinstance(value, list) else value) or "(empty)"
