"""Evaluation of generative models: generates texts for sets of pairs and scores them."""
