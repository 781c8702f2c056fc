"""Text vectors in use: scores on test sets, and training pairs.

evaluation.py   similarity of pairs (STS), retrieval on files in BEIR's layout, clusters
mteb_tasks.py   tasks of MTEB, with the package mteb
mining.py       hard negatives, and pairs from texts with classes
__main__.py     the commands

Search itself is `inference/search.py`, vectors are `Model.encode`.
"""
