"""Hugging Face folders: weights, config, tokenizer and model card."""
