"""A model in a browser on this machine: `python -m convbert_jax.demo --workdir=runs/mine`.

app.py       what is answered to a browser
static/      the page
__main__.py  the command line
"""
