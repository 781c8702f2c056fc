"""Inference: predictions, embeddings and generated texts for new text."""
