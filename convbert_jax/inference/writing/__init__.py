"""Inference with generative models.

texts.py    encodes inputs and decodes outputs for each recipe
dealing.py  batches texts of similar length in a few static shapes
writer.py   generates texts on the device
reading.py  reads the mean of a run's checkpoints; changes decoding settings
model.py    the model that `convbert_jax.load` returns for such a run
"""
