"""Local Google Cloud Storage server with the API subset of TensorStore and gcsfs.

Implements the JSON API. Objects are written atomically, have a generation, and can be read in
ranges, listed by prefix and deleted. Renaming, appending and locking do not exist.
"""

import contextlib
import http.server
import json
import os
import pathlib
import tempfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator

_OBJECTS = "/storage/v1/b/bucket/o"


class Server(http.server.ThreadingHTTPServer):
    """Objects of the bucket `bucket`, stored as files of a folder.

    Tests may set `fault(method, name)`, which returns an HTTP status to fail with, or None.
    """

    daemon_threads = True

    def __init__(self, folder: pathlib.Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.lock = threading.Lock()
        self.fault: Callable[[str, str], int | None] = lambda method, name: None
        self.written: list[str] = []
        self._generation = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def names(self, prefix: str) -> list[str]:
        places = (path for path in self.folder.rglob("*") if path.is_file())
        names = (path.relative_to(self.folder).as_posix() for path in places)
        return sorted(name for name in names if name.startswith(prefix))

    def generation(self, name: str) -> int:
        """Returns an object's generation: its file's unique timestamp, or 0 if it is missing."""
        try:
            return (self.folder / name).stat().st_mtime_ns
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def write(self, name: str, content: bytes) -> None:
        place = self.folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder.parent, delete=False) as file:
            file.write(content)
        self._generation += 1_000_000
        os.utime(file.name, ns=(self._generation, self._generation))
        os.replace(file.name, place)
        self.written.append(name)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format, *arguments):
        del format, arguments

    def do_GET(self):
        if self._path() == _OBJECTS:
            return self._list()
        name = self._name()
        if not self._may("GET", name):
            return None
        with self.server.lock:
            generation = self.server.generation(name)
            content = (self.server.folder / name).read_bytes() if generation else b""
        if not generation:
            return self._answer(404)
        if self._query().get("alt") != "media":
            return self._describe(name)
        first, last = 0, len(content) - 1
        if asked := self.headers.get("Range"):
            begin, _, end = asked.removeprefix("bytes=").partition("-")
            first, last = (int(begin), int(end or last)) if begin else (last + 1 - int(end), last)
            if first > last:
                return self._answer(416)
        headers = {"x-goog-generation": str(generation)}
        if asked:
            last = min(last, len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._answer(206 if asked else 200, content[first : last + 1], headers)

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self._query()["name"]
        if not self._may("POST", name):
            return
        with self.server.lock:
            self.server.write(name, content)
        self._describe(name)

    def do_DELETE(self):
        name = self._name()
        if not self._may("DELETE", name):
            return
        with self.server.lock:
            (self.server.folder / name).unlink()
        self._answer(204)

    def _list(self):
        query = self._query()
        first, last = query.get("startOffset", ""), query.get("endOffset")
        names = self.server.names(query.get("prefix", ""))
        found = [name for name in names if name >= first and (last is None or name < last)]
        self._answer(200, json.dumps({"items": [self._metadata(name) for name in found]}).encode())

    def _may(self, method: str, name: str) -> bool:
        """Returns whether the request may proceed; otherwise sends the error response."""
        if status := self.server.fault(method, name):
            self._answer(status)
            return False
        generation = self.server.generation(name)
        query = self._query()
        wanted, unwanted = (query.get(f"ifGeneration{which}Match") for which in ("", "Not"))
        if wanted is not None and int(wanted) != generation:
            self._answer(412)
        elif unwanted is not None and int(unwanted) == generation:
            self._answer(304)
        elif method == "DELETE" and not generation:
            self._answer(404)
        else:
            return True
        return False

    def _describe(self, name: str):
        self._answer(200, json.dumps(self._metadata(name)).encode())

    def _metadata(self, name: str) -> dict[str, str]:
        generation = self.server.generation(name)
        size = (self.server.folder / name).stat().st_size
        return {
            "name": name,
            "bucket": "bucket",
            "generation": str(generation),
            "size": str(size),
        }

    def _path(self) -> str:
        return urllib.parse.urlsplit(self.path).path

    def _name(self) -> str:
        return urllib.parse.unquote(self._path().removeprefix(f"{_OBJECTS}/"))

    def _query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query))

    def _answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[Server]:
    """Serves the objects in `folder` from a thread."""
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
