"""Reports at the end of a run: a text on the terminal and report.html.

page.py         renders report.html from templates/; commands to run next
pretraining.py  text and page of a pre-training run, with predictions for held-out rows
finetuning.py   page of a fine-tuning run
"""
