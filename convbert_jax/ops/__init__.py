"""Arrays in, arrays out: the arithmetic of layers, by the best implementation per platform.

Axes legend of the whole package: B batch, L length, S length of the keys where it is another,
C channels, H heads, D head width, K taps of a filter, V vocabulary, E embedding channels, N layers,
M masked positions.

A *filter* is what a convolution sums with, one number for each of its K *taps*; a tap reads the
position that is its *offset* away (taps.py). A *kernel* is the matrix of a dense layer, as in Flax,
or in the folders of this one a program written for a chip; never a filter.
"""
