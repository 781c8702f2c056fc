"""What a program costs on a TPU, by the TPU compiler's own model."""
