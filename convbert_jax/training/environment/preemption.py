"""What Compute Engine says of a machine before it takes it away: its metadata server is asked."""

import http.client
import os
import threading
import urllib.request
from collections.abc import Callable

from convbert_jax.machine.accelerators import find_accelerators

_HOST = "GCE_METADATA_HOST"  # as Google's own libraries read it
# Key of the metadata server -> what it says when the machine is about to go.
_NOTICES = {"preempted": "TRUE", "maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
_LOOK = 60  # seconds that the server keeps a question without news open
_PAUSE = 10.0  # seconds after one that was not answered


def listen(tell: Callable[[str], None], over: threading.Event) -> None:
    """Calls `tell` from a thread with a notice, where this machine has a TPU or GCE_METADATA_HOST
    names a server; until `over`.
    """
    if not (os.environ.get(_HOST) or find_accelerators().chips):
        return
    for key in _NOTICES:
        threading.Thread(
            target=_ask, args=(key, tell, over), daemon=True, name=f"notice {key}"
        ).start()


def _ask(key: str, tell: Callable[[str], None], over: threading.Event) -> None:
    host = os.environ.get(_HOST) or "metadata.google.internal"
    address = f"http://{host}/computeMetadata/v1/instance/{key}?wait_for_change=true"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    etag = "0"  # answered at once with what is known
    while not over.is_set():
        request = urllib.request.Request(
            f"{address}&timeout_sec={_LOOK}&last_etag={etag}", headers={"Metadata-Flavor": "Google"}
        )
        try:
            with opener.open(request, timeout=2 * _LOOK) as answer:
                said = answer.read().decode(errors="replace").strip()
                etag = answer.headers.get("ETag", "0")
        except (OSError, http.client.HTTPException):
            over.wait(_PAUSE)
            continue
        if said == _NOTICES[key] and not over.is_set():
            tell(f"{key}={said}")
            return
        if etag == "0":  # a server that knows no changes would be asked without a pause
            over.wait(_PAUSE)
