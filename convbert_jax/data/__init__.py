"""Data pipeline: tokenizers, document sources, prepared rows and resumable iteration.

This package does not import jax, so worker processes start fast and no array touches a device.
"""
