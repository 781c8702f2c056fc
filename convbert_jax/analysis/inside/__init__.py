"""What the layers of a model do with text, as numbers and pictures.

maps.py      attention maps, averaged by position, and how near to the diagonal they are
filters.py   the filters of one word wherever it stands
pictures.py  both as PNG

Nothing here knows where maps and filters are from: `recipes/inspection.py` does.
"""
