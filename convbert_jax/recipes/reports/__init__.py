"""Reports at the end of a run: a text on the terminal and report.html.

pretraining.py    text and page of a pre-training run
finetuning.py     page of a fine-tuning run
held_out_text.py  predictions for held-out rows
commands.py       commands to run next
page.py           renders report.html from templates/
"""
