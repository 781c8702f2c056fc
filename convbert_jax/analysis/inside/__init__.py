"""Inspection of layers: attention maps and dynamic convolution filters.

maps.py      attention maps averaged by position, and their diagonal concentration
filters.py   filters of one word in different contexts
pictures.py  figures of both (PNG)

`recipes/inspection.py` computes the inputs from a model.
"""
