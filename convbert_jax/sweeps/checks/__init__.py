"""What is refused of a sweep before anything runs, and whose fault it is.

rows.py   rows whose configs cannot be, or are the same
files.py  weights, text and tasks that are not there
"""
