"""Logging, metrics files, trackers and profiling of a run."""
