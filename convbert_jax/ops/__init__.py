"""Array operations of the layers, each with the best implementation for the platform.

Axis names in shapes, in the whole package: B batch, L length, S key length if different from L,
C channels, H heads, D head width, K filter taps, V vocabulary, E embedding channels, N layers,
M masked positions.

A *filter* holds the K weights of a convolution, one per *tap*; a tap reads the position at its
*offset* (`xla.tap_offsets`). A *kernel* is the matrix of a dense layer, as in Flax, or, in `gpu.py`
and `tpu/`, a program written for an accelerator; never a filter.
"""
