"""Builds what pyproject.toml cannot describe.

- configs/ is installed as convbert_jax/configs/.
- Links of README.md become absolute if the repository has an address.
"""

import pathlib
import re
import tomllib

from setuptools import find_packages, setup

HERE = pathlib.Path(__file__).resolve().parent


def describe() -> str:
    """Returns README.md; a package index does not know the files that it links to."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    if not (address := project.get("urls", {}).get("Repository")):
        return readme
    links = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")

    def absolute(link: re.Match) -> str:
        mark, text, target = link.groups()
        return f"{mark}[{text}]({address}/{'raw' if mark else 'blob'}/main/{target})"

    return links.sub(absolute, readme)


setup(
    packages=[*find_packages(include=["convbert_jax", "convbert_jax.*"]), "convbert_jax.configs"],
    package_dir={"convbert_jax.configs": "configs"},
    package_data={
        "convbert_jax": ["py.typed"],
        "convbert_jax.serve": ["static/*"],
        "convbert_jax.recipes.reports": ["templates/*"],
    },
    include_package_data=False,
    long_description=describe(),
    long_description_content_type="text/markdown",
)
