"""Saving, restoring and verifying checkpoints."""
