"""The names under which a config asks for an implementation of an op, and what each runs on.

The ops are in `ops/`, their tables have the same names; a test compares them.
"""

# name -> the platform whose devices it needs, "" for any
ATTENTIONS = {"xla": "", "pallas_tpu": "tpu", "cudnn": "gpu", "splash": "tpu"}
CONVOLUTIONS = {"xla": "", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "reference": ""}
