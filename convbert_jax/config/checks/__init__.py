"""Validation of configs before any long work starts."""
