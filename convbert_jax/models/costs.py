"""FLOPs per element, counted as in the ConvBERT paper; see `analysis/flops.py`."""

LAYER_NORM = 5
GELU = 8
SOFTMAX = 5
DROPOUT = 4
GLU = 5  # a sigmoid and a product
