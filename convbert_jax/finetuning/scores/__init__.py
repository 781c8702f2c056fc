"""Metrics, and the table of scores over seeds beside published ones."""
