"""A corpus as rows of token ids on disk, and the batches that training reads of it."""
