"""Fine-tuning tasks: classification, regression, tagging, and question answering."""
