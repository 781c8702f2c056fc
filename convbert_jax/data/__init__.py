"""Text to batches: tokenizers, sources of documents, prepared rows, resumable iteration.

Nothing here imports jax: the worker processes start fast, and no array touches a device.
"""
