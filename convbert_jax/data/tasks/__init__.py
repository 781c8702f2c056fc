"""Labeled tasks as batches: GLUE, SQuAD and user-defined tasks."""
