"""Pages in Chromium show all texts and send no requests."""

import contextlib
import pathlib
import socketserver
import subprocess
import threading
from collections.abc import Iterator, Sequence

import pytest

from tests.browser import CHROMIUM, FLAGS, needs_chromium, open_tab
from tests.html import Page
from tests.pictures import shows_something
from tests.recipes.test_reports import page_of_pretraining, page_of_tasks

pytestmark = [pytest.mark.slow, needs_chromium]
ATTACK = '<img src="http://example.invalid/x"><script>document.title = "taken"</script>'


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy that answers nothing, and the requests it received."""
    asked = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            asked.append(self.rfile.readline().decode("latin-1"))
            self.wfile.write(b"HTTP/1.1 503 Nothing\r\nContent-Length: 0\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def browse(folder: pathlib.Path, html: str, *flags: str) -> tuple[str, Sequence[str]]:
    """Return the browser's output and its requests to the host of ATTACK."""
    file = folder / "page.html"
    file.write_text(html)
    with proxy() as (address, asked):
        profile = f"--user-data-dir={folder / 'profile'}"
        done = subprocess.run(
            [CHROMIUM, *FLAGS, f"--proxy-server={address}", profile, *flags, file.as_uri()],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in asked if "example.invalid" in line]


def test_an_unsafe_page_would_be_noticed(tmp_path):
    """Shows that the test below can fail."""
    shown, asked = browse(tmp_path, f"<!DOCTYPE html><p>{ATTACK}</p>", "--dump-dom")
    assert asked
    assert "<title>taken</title>" in shown


@pytest.mark.parametrize("make", [page_of_pretraining, page_of_tasks])
def test_pages_are_safe_complete_and_fit_a_telephone(make, tmp_path):
    html = make([ATTACK] * 19)
    picture = tmp_path / "page.png"
    shown, asked = browse(tmp_path, html, "--dump-dom", f"--screenshot={picture}")
    assert asked == []
    assert Page(shown).text.strip() == Page(html).text.strip()
    assert ATTACK in Page(shown).texts("h1")
    assert shows_something(picture)
    file = tmp_path / "page.html"
    with open_tab(file.as_uri(), tmp_path / "tab", "--window-size=400,900") as tab:
        width = tab.evaluate("document.documentElement.clientWidth")
        assert width < 500
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('section').length") > 2
        assert tab.errors == []
