"""Properties of this machine, as reported by the operating system; does not import jax.

accelerators.py  TPU chips and NVIDIA driver
limits.py        memory and CPUs, with container limits
packages.py      versions of installed packages
allocator.py     memory allocator settings
processor.py     CPU features
"""
