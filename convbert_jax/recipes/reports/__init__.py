"""What a run tells a person at its end: a text, and a page for a browser that says more.

pretraining_text.py  of one long run: what there is to tell, and the text
pretraining_page.py  the same as WORKDIR/report.html
finetuning_page.py   that of labelled tasks, whose text is their table
commands.py          what to type next
run_page.py          what every page has: state, config, versions; how it is written
"""
