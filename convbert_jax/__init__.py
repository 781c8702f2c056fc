"""Efficient convolution/attention encoders (ConvBERT and its relatives) in JAX, TPU first."""
