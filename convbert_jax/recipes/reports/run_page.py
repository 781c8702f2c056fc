"""What the page of any run has, and how it comes to its file."""

import dataclasses
import datetime
import platform
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from xml.etree.ElementTree import Element

import jax
from absl import logging

import convbert_jax
from convbert_jax import files
from convbert_jax.config import Config
from convbert_jax.html_page import blocks
from convbert_jax.html_page.elements import element, foreign, render
from convbert_jax.training.environment import devices
from convbert_jax.workdir import Workdir

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def write(workdir: Workdir, make: Callable[[], str]) -> bool:
    """Writes WORKDIR/report.html; whatever keeps it from that is a warning, as the run itself is
    done and kept.

    Args:
      make: the page.

    Returns:
      whether it is there.
    """
    try:
        files.write_text(workdir.report, make())
    except Exception as error:
        reason = str(error).partition("\n")[0]
        logging.warning(
            "%s could not be written (%s: %s); the run itself is kept.",
            workdir.report,
            type(error).__name__,
            reason,
        )
        return False
    return True


@dataclasses.dataclass(frozen=True)
class About:
    """What is told of any run.

    Attributes:
      written: when the page was, in UTC.
      leave_out: sections and fields of the config that the recipe does not read.
      place: devices and versions, by name.
    """

    written: datetime.datetime
    leave_out: Collection[str]
    place: Mapping[str, str]


def describe(config: Config, mesh: jax.sharding.Mesh, leave_out: Collection[str]) -> About:
    """What is to be told of a run that ends now on the devices of `mesh`."""
    found = list(mesh.devices.flat)
    versions = {name: metadata.version(name) for name in _LIBRARIES}
    place = {
        "devices": devices.describe_devices(found),
        "mesh": ", ".join(f"{name} {size}" for name, size in mesh.shape.items()),
        "processes": str(jax.process_count()),
        "computed in": str(devices.compute_dtype(config, found[0])),
        "convbert_jax": convbert_jax.__version__,
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        **versions,
    }
    return About(datetime.datetime.now(datetime.UTC), leave_out, place)


def make(
    config: Config,
    state: str,
    go_on: str,
    sections: Sequence[Element],
    about: About,
) -> str:
    """The page around what the recipe shows.

    Args:
      state: in words, how far the run came.
      go_on: the command for one that was interrupted; "" for one that is finished.
    """
    kind = "interrupted" if go_on else "finished"
    head = [
        element("h1", foreign(config.name)),
        element(
            "p",
            element("span", state, class_=f"state {kind}"),
            f" · config.recipe={config.recipe} · written {about.written:%Y-%m-%d %H:%M} UTC",
        ),
    ]
    if go_on:
        head += [element("p", "It goes on from there with:"), blocks.code(go_on)]
        if jax.process_count() > 1:
            several = f"on all {jax.process_count()} processes, with the flags that join them."
            head.append(element("p", several, class_="note"))
    ends = [
        blocks.section("Config", blocks.fields(config, about.leave_out)),
        blocks.section("Versions and devices", blocks.facts(about.place)),
    ]
    return render(f"{config.name}: {state}", element("header", *head), *sections, *ends)
