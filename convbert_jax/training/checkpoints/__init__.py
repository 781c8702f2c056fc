"""Checkpoints: written, read, proven whole."""
