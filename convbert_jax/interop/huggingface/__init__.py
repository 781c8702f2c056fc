"""Folders of Hugging Face: weights, config, tokenizer, model card."""
