"""What pyproject.toml cannot say: the folder configs/ is installed as convbert_jax/configs/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["convbert_jax", "convbert_jax.*"]), "convbert_jax.configs"],
    package_dir={"convbert_jax.configs": "configs"},
    package_data={
        "convbert_jax": ["py.typed"],
        "convbert_jax.demo": ["static/*"],
        "convbert_jax.recipes.reports": ["templates/*"],
    },
)
