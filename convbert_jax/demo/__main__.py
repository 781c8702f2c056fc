"""Serves a model to browsers on this machine until Ctrl-C.

python -m convbert_jax.demo --workdir=runs/mine
"""

import argparse
import sys

from convbert_jax import console

with console.missing_package_message():
    from convbert_jax.config import UserError, plugins


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convbert_jax.demo", description=__doc__)
    parser.add_argument(
        "--workdir",
        required=True,
        help="Run, fine-tuned model, Hugging Face folder or TensorFlow 1 checkpoint.",
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="Port on 127.0.0.1; 0 picks a free one."
    )
    parser.add_argument(
        "--plugins",
        default="",
        help="Python objects that the model's config may import: PACKAGE.MODULE:NAME,…",
    )
    return parser


def main() -> None:
    options = make_parser().parse_args()
    with console.missing_package_message():
        console.set_up_logging()
    if not 0 <= options.port < 2**16:
        console.fail(f"--port={options.port} is not between 0 and 65535.", code=2)
    try:
        from convbert_jax.demo import app
    except ModuleNotFoundError as error:
        if error.name != "flask":
            raise
        console.fail("The demo needs Flask: pip install flask, or install the extra demo.")
    with console.missing_package_message():
        from convbert_jax.inference.loading import load
    plugins.allow(options.plugins.split(","))
    try:
        model = load(options.workdir)
        server = app.make_server(app.make_app(model), options.port)
    except UserError as error:
        console.fail(str(error))
    print(f"Serving {model} at http://127.0.0.1:{server.port}; stop with Ctrl-C.", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit()


if __name__ == "__main__":
    main()
