"""Labelled tasks: GLUE, SQuAD, own files, as batches."""
