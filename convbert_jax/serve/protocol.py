"""Runs the application with uvicorn: time limits of connections and a graceful stop."""

import asyncio
import signal
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from convbert_jax.serve.app import BODY_SECONDS, InferenceApp

_CONNECTIONS = 512
_HEAD_SECONDS = 10.0  # to receive the head of a request
_SEND_SECONDS = 10.0  # to send the rest of an answer


def run(app: InferenceApp, listener: socket.socket, timeout: float) -> None:
    """Serves until SIGINT or SIGTERM, then answers the received requests and returns.

    Args:
      timeout: maximum seconds to compute an answer.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # uvicorn raises them again at its end
        signal.signal(number, lambda *_: None)
    make_server(app, timeout).run(sockets=[listener])


def make_server(app: InferenceApp, timeout: float) -> uvicorn.Server:
    """Returns the server of `run`."""
    longest = _HEAD_SECONDS + BODY_SECONDS + timeout + _SEND_SECONDS
    config = uvicorn.Config(
        app.asgi,
        http=_make_protocol(longest),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=_CONNECTIONS,
        timeout_graceful_shutdown=round(longest) + 1,
    )
    return _Uvicorn(config, app)


class _Uvicorn(uvicorn.Server):
    """Marks the application as stopping before uvicorn closes connections."""

    def __init__(self, config: uvicorn.Config, app: InferenceApp):
        super().__init__(config)
        self._inference_app = app

    def handle_exit(self, sig, frame) -> None:
        self._inference_app.stopping = True
        super().handle_exit(sig, frame)


def _make_protocol(longest: float) -> type[H11Protocol]:
    """Returns the protocol of connections that are aborted if a client is too slow.

    uvicorn limits only the time between two requests. A client that sends the head of a request
    slowly, or does not read the answer, would hold its connection forever.

    Args:
      longest: maximum seconds from the start of a request to its answer.
    """

    class Protocol(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._start_timer(self.cycle)

        def connection_lost(self, exc) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def data_received(self, data) -> None:
            if self._timer is None:
                self._start_timer(self.cycle)
            super().data_received(data)

        def on_response_complete(self) -> None:
            self._stop_timer()
            super().on_response_complete()
            if self.transport.is_closing():
                self._abort_later(_SEND_SECONDS)
            elif not self.cycle.response_complete:  # a pipelined request
                self._start_timer(None)

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._abort_later(_SEND_SECONDS)  # closing waits until the client has read the answer

        def _start_timer(self, before) -> None:
            self._timer = self.loop.call_later(_HEAD_SECONDS, self._check_head, before)

        def _stop_timer(self) -> None:
            if self._timer:
                self._timer.cancel()
            self._timer = None

        def _check_head(self, before) -> None:
            if self.cycle is before:  # a complete head makes a new cycle
                self.transport.abort()
            else:
                self._abort_later(longest - _HEAD_SECONDS)

        def _abort_later(self, seconds: float) -> None:
            self._stop_timer()
            self._timer = self.loop.call_later(seconds, self.transport.abort)

    return Protocol
