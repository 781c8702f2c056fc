"""Stops a run on SIGTERM (schedulers), SIGINT (Ctrl-C) and preemption notices of Compute Engine."""

import http.client
import os
import signal
import threading
import urllib.request

from absl import logging

from convbert_jax import interrupts
from convbert_jax.machine.accelerators import find_accelerators
from convbert_jax.training import distributed

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_METADATA_HOST = "GCE_METADATA_HOST"  # as Google's own libraries read it
# Key of the metadata server -> its value before the machine is taken away.
_NOTICES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_POLL = 60  # seconds that the server holds a request without news
_RETRY = 10.0  # seconds after a failed request


class StopSignals:
    """Context in which the first signal or preemption notice requests a stop.

    A second SIGTERM ends the process at once, unless it is an echo of the first
    (`interrupts.ECHO`); a second Ctrl-C raises KeyboardInterrupt, so that a notebook survives. A
    SIGTERM after a preemption notice counts as the first one.

    Notices are read if this machine has a TPU or GCE_METADATA_HOST names a server.
    """

    def __init__(self):
        self._received: str | None = None
        self._previous = {}
        several = distributed.place()[1] > 1
        self._agreement = distributed.StopAgreement() if several else None
        self._requested = False
        self._over = threading.Event()

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        else:
            logging.warning("Not in the main thread: the run cannot stop cleanly on signals.")
        if self._agreement:
            self._agreement.__enter__()
        if os.environ.get(_METADATA_HOST) or find_accelerators().chips:
            for key in _NOTICES:
                threading.Thread(
                    target=self._read_notices, args=(key,), daemon=True, name=f"notice {key}"
                ).start()
        return self

    def __exit__(self, *exception):
        self._over.set()
        self._restore_handlers()
        if self._agreement:
            if exception[0] is None:
                self._request()
            self._agreement.__exit__(*exception)

    def requested(self, done: int = 0) -> str | None:
        """Returns the signal's name if the run stops before its next step, otherwise None.

        With several processes, a signal to any of them stops all of them after the same step.

        Args:
          done: steps so far, the same count on all processes; each calls this after every step.
        """
        if self._agreement is None:
            return self._received
        self._request()
        return self._agreement.stops_after(done)

    def _request(self) -> None:
        if self._received and not self._requested:
            self._requested = True
            self._agreement.request(self._received)

    def _receive(self, number, frame):
        del frame
        self._received = signal.Signals(number).name
        self._restore_handlers()
        interrupts.is_first(number)

        def end(second, frame):
            if interrupts.is_first(second):
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)

        signal.signal(signal.SIGTERM, end)

    def _restore_handlers(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _notice(self, what: str):
        logging.info("Compute Engine is reclaiming this machine (%s): stopping.", what)
        self._received = self._received or signal.SIGTERM.name

    def _read_notices(self, key: str) -> None:
        host = os.environ.get(_METADATA_HOST) or "metadata.google.internal"
        address = f"http://{host}/computeMetadata/v1/instance/{key}?wait_for_change=true"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        etag = "0"  # answered at once with the current value
        while not self._over.is_set():
            request = urllib.request.Request(
                f"{address}&timeout_sec={_POLL}&last_etag={etag}",
                headers={"Metadata-Flavor": "Google"},
            )
            try:
                with opener.open(request, timeout=2 * _POLL) as answer:
                    value = answer.read().decode(errors="replace").strip()
                    etag = answer.headers.get("ETag", "0")
            except (OSError, http.client.HTTPException):
                self._over.wait(_RETRY)
                continue
            if value == _NOTICES[key] and not self._over.is_set():
                self._notice(f"{key}={value}")
                return
            if etag == "0":  # a server without change tags answers at once
                self._over.wait(_RETRY)
