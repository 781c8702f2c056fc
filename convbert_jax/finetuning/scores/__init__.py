"""Metrics, and tables of scores over seeds with published scores."""
