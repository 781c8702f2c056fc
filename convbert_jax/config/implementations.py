"""Names of the implementations of ops that a config selects, and the platform of each.

The tables in `ops/` have the same names; a test compares them.
"""

# name -> required platform, "" for any
ATTENTIONS = {"xla": "", "pallas_tpu": "tpu", "cudnn": "gpu", "splash": "tpu"}
CONVOLUTIONS = {"xla": "", "pallas_tpu": "tpu", "pallas_gpu": "gpu", "reference": ""}
