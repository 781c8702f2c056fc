"""Text vectors in use: scores on test sets, and mining of hard negatives.

evaluation.py   similarity of pairs (STS), retrieval on files in BEIR's layout, clusters
mining.py       hard negatives for the training of vectors
__main__.py     the commands

Search itself is `inference/search.py`, vectors are `Model.encode`.
"""
