"""A page that a run leaves behind: one HTML file, without scripts, that needs no other file.

elements.py  tags of texts, whatever is in the texts, and the document around them
blocks.py    tables, commands, pictures, the fields of a config
charts.py    curves over steps and scores of seeds, as SVG inside the page
style.py     the style sheet, light and dark, for wide and narrow windows
"""
