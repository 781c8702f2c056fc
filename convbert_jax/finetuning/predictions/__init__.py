"""Predictions: collection from batches, answers, files and pictures."""
