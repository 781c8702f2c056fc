"""Drives Chromium over its debugging pipe, to type and click in pages."""

import contextlib
import itertools
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Tab:
    """A page; `errors` holds uncaught script errors."""

    def __init__(self, asks, answers):
        self._asks, self._answers = asks, answers
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        self.errors: list[str] = []

    def open(self, address: str) -> None:
        """Opens an address and returns once the page is loaded."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self._call("Runtime.enable")
        self._call("Page.enable")
        self._call("Page.navigate", url=address)
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, script: str) -> Any:
        """Returns the value of a JavaScript expression; awaits promises."""
        said = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Waits until a JavaScript expression is true; checks it on every change of the page."""
        self.evaluate(
            f"""new Promise((done) => {{
              const look = () => {{ if ({condition}) {{ watcher.disconnect(); done(); }} }};
              const watcher = new MutationObserver(look);
              watcher.observe(document, {{ subtree: true, childList: true, attributes: true }});
              look();
            }})"""
        )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        ask = {"id": number, "method": method, "params": parameters} | self._session
        self._asks.write(json.dumps(ask).encode() + b"\0")
        self._asks.flush()
        while (answer := self._read()).get("id") != number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        said = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser exited"
            said += byte
        message = json.loads(said)
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"]["text"])
        return message


@contextlib.contextmanager
def open_tab(address: str, profile: pathlib.Path, *flags: str) -> Iterator[Tab]:
    """Opens the page at `address` in a new browser."""
    (theirs_in, asks), (answers, theirs_out) = os.pipe(), os.pipe()
    command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", *flags]
    # Chromium reads descriptor 3 and writes 4; here they may have other numbers. sh supports only
    # descriptors up to 9.
    redirected = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    browser = subprocess.Popen(
        ["bash", "-c", redirected, *command],
        pass_fds=(theirs_in, theirs_out),
        stderr=subprocess.DEVNULL,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    with os.fdopen(asks, "wb") as asks, os.fdopen(answers, "rb") as answers:
        try:
            tab = Tab(asks, answers)
            tab.open(address)
            yield tab
        finally:
            browser.kill()
            browser.wait()
