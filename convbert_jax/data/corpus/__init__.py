"""Corpora as rows of token ids on disk, and the batches that pre-training reads from them."""
