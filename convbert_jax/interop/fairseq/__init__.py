"""fairseq's translation and language models: LightConv, DynamicConv and Transformer."""
