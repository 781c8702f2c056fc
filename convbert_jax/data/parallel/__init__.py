"""Parallel text as rows of token ids on disk, and training batches of a few shapes."""
