"""Checkpoints of the official TensorFlow 1 code, read and written without TensorFlow."""
