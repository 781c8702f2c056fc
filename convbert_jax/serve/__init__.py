"""An HTTP server for a model: `python -m convbert_jax.serve --workdir=runs/mine`.

app.py       routes, validation of requests, limits
routes.py    functions of the model that answer the routes, and their warm-up
protocol.py  connections: time limits, graceful stop
batching.py  queue that computes the texts of concurrent requests together
static/      page for a browser
__main__.py  command line
"""
