"""Models that write text in use.

texts.py    what a model of each recipe reads of a text, and the text of what it wrote
dealing.py  texts to batches of a few static shapes
writer.py   texts in, texts out, on the device
reading.py  a run's writer: its vocabularies, and the mean of its checkpoints
model.py    what `convbert_jax.load` gives of such a run
"""
