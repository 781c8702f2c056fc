"""Tokenizers: vocabularies, normalization, token offsets and vocabulary checks."""
