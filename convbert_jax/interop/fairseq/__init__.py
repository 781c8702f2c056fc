"""Models of fairseq that write text: LightConv, DynamicConv and the Transformer beside them."""
