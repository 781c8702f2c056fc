"""Serves a model over HTTP until Ctrl-C or SIGTERM.

python -m convbert_jax.serve --workdir=runs/mine
"""

import argparse
import ipaddress
import os
import socket
import sys

from convbert_jax import console

with console.missing_package_message():
    from convbert_jax.config import UserError, plugins


class ListenError(UserError):
    """The server cannot listen on the address."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m convbert_jax.serve", description=__doc__)
    parser.add_argument(
        "--workdir",
        required=True,
        help="Run, fine-tuned model, Hugging Face folder or TensorFlow 1 checkpoint.",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="Address to listen on; 0.0.0.0 for all interfaces.",
    )
    parser.add_argument("--port", type=int, default=8000, help="Port; 0 picks a free one.")
    parser.add_argument(
        "--max_wait_ms",
        type=float,
        default=5.0,
        help="Maximum milliseconds that a text waits for further texts of its batch.",
    )
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="Maximum seconds to answer a request."
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=1024,
        help="Maximum number of waiting texts; further requests get status 503.",
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
    _check(options)
    try:
        from convbert_jax.serve import app, protocol
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "prometheus_client"):
            raise
        console.fail(f"The server needs {error.name}. Install it, or the extra serve.")
    with console.missing_package_message():
        from convbert_jax.inference.loading import load
    plugins.allow(options.plugins.split(","))
    try:
        listener = listen(options.host, options.port)
        model = load(options.workdir)
    except UserError as error:
        console.fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    key = os.environ.get("CONVBERT_API_KEY", "")
    application = app.InferenceApp(
        model,
        local=local,
        api_key=key,
        max_wait=options.max_wait_ms / 1e3,
        timeout=options.timeout,
        queue=options.queue,
    )
    if not local and not key:
        print("Anyone who can reach this port may use it; set CONVBERT_API_KEY to require a key.")
    host = f"[{options.host}]" if ":" in options.host else options.host
    port = listener.getsockname()[1]
    print(f"Serving {model} at http://{host}:{port}; stop with Ctrl-C.", flush=True)
    protocol.run(application, listener, options.timeout)


def _check(options: argparse.Namespace) -> None:
    """Exits with an error if a number is out of bounds."""
    bounds = {
        "port": (0, 2**16 - 1),
        "max_wait_ms": (0, 1_000),
        "timeout": (1, 3_600),
        "queue": (256, 2**20),  # at least the texts of one request
    }
    for name, (least, most) in bounds.items():
        if not least <= getattr(options, name) <= most:
            value = f"--{name}={getattr(options, name)}"
            console.fail(f"{value} is not between {least} and {most}.", code=2)


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket; port 0 picks a free one.

    Raises:
      ListenError: the address is not one of this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ListenError(
            f"Cannot listen on --host={host} --port={port}: {error.strerror or error}. Use the "
            "address of an interface of this machine and a free port, or port 0.",
            field="--port",
            value=port,
        ) from None


if __name__ == "__main__":
    main()
