"""The machine that a process is on, as the system knows it: nothing here loads jax.

accelerators.py  TPU chips and NVIDIA's driver
limits.py        memory and CPUs, within the limits of a container
packages.py      versions of what is installed
allocator.py     how the process takes memory
processor.py     what the processor multiplies
"""
