"""A model in a browser on this machine: `python -m convbert_jax.demo --workdir=runs/mine`.

app.py       HTTP server
static/      page
__main__.py  command line
"""
