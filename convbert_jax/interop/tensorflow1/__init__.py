"""Reader and writer of checkpoints of the official TensorFlow 1 code, without TensorFlow."""
