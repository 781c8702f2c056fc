"""What is fine-tuned on: classification, regression, tagging, answers."""
