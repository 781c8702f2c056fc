"""Fine-tuned models in use: new text in, predictions out."""
