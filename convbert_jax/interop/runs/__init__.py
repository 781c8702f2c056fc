"""Vocabularies of runs."""
