"""What the first and the second signal do."""

import http.server
import signal
import threading

import pytest

from convbert_jax.training.environment.signals import StopSignals


@pytest.fixture
def before():
    """Python's own handler, also where the tests were started with Ctrl-C ignored, as by `&`."""
    kept = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, kept)


def test_a_second_interrupt_is_what_it_was_before(before):
    """KeyboardInterrupt here and in a notebook, not the end of the process."""
    with StopSignals() as stop:
        assert stop.requested() is None
        signal.raise_signal(signal.SIGINT)
        assert stop.requested() == "SIGINT"
        assert signal.getsignal(signal.SIGINT) is before
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Metadata(http.server.BaseHTTPRequestHandler):
    """Answers as the metadata server: at once to last_etag=0, then when something changes."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Metadata-Flavor"]))
        key = self.path.partition("?")[0].rpartition("/")[2]
        if key == "maintenance-event":
            self.server.both.set()
        if not self.path.endswith("last_etag=0"):
            self.server.changed.wait(60)
        changed = self.server.changed.is_set() and key == "preempted"
        text = b"TRUE" if changed else {"preempted": b"FALSE"}.get(key, b"NONE")
        self.send_response(200)
        self.send_header("ETag", "f00" if not changed else "f01")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def metadata(monkeypatch):
    with http.server.ThreadingHTTPServer(("localhost", 0), Metadata) as server:
        server.daemon_threads = True
        server.asked, server.changed, server.both = [], threading.Event(), threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_HOST", f"localhost:{server.server_port}")
        yield server
        server.changed.set()
        server.shutdown()


def test_a_notice_asks_as_a_signal_does_and_leaves_the_first_one_to_come(metadata, monkeypatch):
    told = threading.Event()
    notice = StopSignals._notice
    monkeypatch.setattr(StopSignals, "_notice", lambda self, what: (notice(self, what), told.set()))
    with StopSignals() as stop:
        ours = signal.getsignal(signal.SIGTERM)
        assert stop.requested() is None
        assert metadata.both.wait(60)
        metadata.changed.set()
        assert told.wait(60)
        assert stop.requested() == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) == ours  # one that follows does not end the save
    paths, flavors = zip(*metadata.asked, strict=True)
    assert any("/instance/preempted?wait_for_change=true" in path for path in paths)
    assert any("/instance/maintenance-event?wait_for_change=true" in path for path in paths)
    assert set(flavors) == {"Google"}


def test_where_nobody_gives_notice_nobody_is_asked(monkeypatch):
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    before = set(threading.enumerate())
    with StopSignals():
        assert not [t for t in threading.enumerate() if t not in before and "notice" in t.name]
