"""What a run tells a person at its end.

pretraining.py  of one long run: numbers, an example, what to do next
"""
