"""The pre-trained convolutions of Tay et al. 2021: encoder-decoders of Mesh TensorFlow and T5."""
