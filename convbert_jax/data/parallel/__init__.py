"""Parallel text as rows of token ids on disk, and batches of few shapes that training reads."""
