"""A page in a real browser: what a person sees, and that nothing leaves the machine."""

import contextlib
import pathlib
import socketserver
import subprocess
import threading
from collections.abc import Iterator, Sequence

import pytest

from convbert_jax.html_page import blocks, charts
from convbert_jax.html_page.elements import element, foreign, render
from tests.browser import CHROMIUM, FLAGS, needs_chromium, open_tab
from tests.html_page.parsed import Page
from tests.pictures import shows_something
from tests.recipes.test_reports import page_of_pretraining, page_of_tasks

pytestmark = [pytest.mark.slow, needs_chromium]
ATTACK = '<img src="http://example.invalid/x"><script>document.title = "taken"</script>'


@contextlib.contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """(address, what it was asked so far) of what stands between the browser and every network."""
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
    """What the browser prints of a page, and what it asked of ATTACK's host; it asks others by
    itself.
    """
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


@pytest.fixture(scope="module")
def page() -> str:
    points = [(step, 1.0 / step) for step in range(1, 9)]
    return render(
        "a run",
        element("h1", foreign(ATTACK)),
        blocks.section("Curves", charts.line_chart("loss", [charts.Line("loss", points)])),
        element("p", "שלום ", foreign("\u202eabc"), dir="auto"),
        blocks.commands([("Go on", "python -m convbert_jax.main --workdir=runs/it")]),
    )


def test_an_unsafe_page_would_be_noticed(tmp_path):
    """That the two tests below can fail."""
    shown, asked = browse(tmp_path, f"<!DOCTYPE html><p>{ATTACK}</p>", "--dump-dom")
    assert asked
    assert "<title>taken</title>" in shown


def test_a_person_sees_the_texts_and_nothing_is_asked_for(page, tmp_path):
    shown, asked = browse(tmp_path, page, "--dump-dom")
    assert asked == []
    assert Page(shown).text.strip() == Page(page).text.strip()
    assert Page(shown).texts("h1") == [ATTACK]
    assert Page(shown).texts("title")[0] == "a run"


def test_it_is_drawn(page, tmp_path):
    picture = tmp_path / "page.png"
    browse(tmp_path, page, f"--screenshot={picture}", "--window-size=600,900")
    assert shows_something(picture)


@pytest.mark.parametrize("make", [page_of_pretraining, page_of_tasks])
def test_the_pages_of_runs(make, tmp_path):
    """Of pre-training and of a sweep of fine-tuning: safe, whole, no wider than a telephone."""
    html = make([ATTACK] * 19)
    shown, asked = browse(tmp_path, html, "--dump-dom")
    assert asked == []
    assert Page(shown).text.strip() == Page(html).text.strip()
    file = tmp_path / "page.html"
    with open_tab(file.as_uri(), tmp_path / "tab", "--window-size=400,900") as tab:
        width = tab.evaluate("document.documentElement.clientWidth")
        assert width < 500
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('section').length") > 2
        assert tab.errors == []
