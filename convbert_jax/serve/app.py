"""The web application: routes, validation of requests, limits and metrics.

Without an API key, every client that can reach the port may use the server. By default it listens
on the loopback interface. There it refuses requests with the host name of another machine, because
a site can point its name to this address (DNS rebinding). It refuses bodies other than JSON,
because a site can send them without a CORS preflight. The page loads nothing from other servers.
"""

import asyncio
import base64
import contextlib
import hmac
import json
import pathlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import prometheus_client
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.config.training import POOLINGS
from convbert_jax.inference.model import Model, TextModel
from convbert_jax.serve import routes
from convbert_jax.serve.batching import MAX_BATCH, Batcher, QueueFullError

MAX_BODY_BYTES = 2**20  # of a request
MAX_TEXTS = 256  # of a request
BODY_SECONDS = 10.0  # to receive a request
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_STATIC = pathlib.Path(__file__).parent / "static"
_PUBLIC = ("/", "/health")  # paths without API key, with the files of the page
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)

Answer = Callable[[dict[str, Any]], Awaitable[Any]]


class InferenceApp:
    """A model, its queue, and the ASGI application that answers requests with them.

    GET  /               page
    GET  /health         200 if the programs are compiled, 503 before that and while stopping
    GET  /model          description of the model
    GET  /metrics        Prometheus
    POST /v1/embeddings  as in OpenAI's API; vectors of length 1
    POST /rerank         {"query": "…", "documents": ["…"]}: documents in order of their score
    POST /predict, /entities, /fill-mask, /replaced, /write
                         {"texts": ["…"]} -> {"answers": […]}

    Errors are {"error": {"message": "…"}}.

    Attributes:
      asgi: the application; its lifespan starts and stops the queue.
      stopping: whether new requests are refused.
    """

    def __init__(
        self,
        model: Model | TextModel,
        *,
        local: bool = True,
        api_key: str = "",
        max_wait: float = 0.005,
        timeout: float = 30.0,
        queue: int = 1024,
        warm_up: bool = True,
    ):
        """
        Args:
          local: refuse requests with a host name other than LOCAL_NAMES.
          api_key: if set, requests need the header "Authorization: Bearer KEY".
          max_wait: maximum seconds that a text waits for further texts of its batch.
          timeout: maximum seconds from the receipt of a request to its answer.
          queue: maximum number of waiting texts.
          warm_up: compile the programs of all batch shapes at the start.
        """
        self._model, self._local, self._timeout = model, local, timeout
        self._key, self.stopping = api_key.encode(), False
        self._functions = routes.make_functions(model)
        self._metrics = _Metrics()
        self.batcher = Batcher(
            max_wait=max_wait,
            capacity=queue,
            warm_up=routes.warm_up(model, self._functions) if warm_up else (),
            observe=self._metrics.batch_size.observe,
        )
        self._metrics.queue.set_function(lambda: len(self.batcher))
        posts: dict[str, Answer] = {"/v1/embeddings": self._embed, "/rerank": self._rerank}
        posts |= {
            path: self._make_answer(path) for path in routes.REQUIREMENTS if path not in posts
        }
        gets = {
            "/": self._page,
            "/health": self._health,
            "/model": self._describe,
            "/metrics": self._report,
        }
        self._paths = frozenset((*gets, *posts))
        starlette = Starlette(
            routes=[
                *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
                *(Route(p, self._make_endpoint(a), methods=["POST"]) for p, a in posts.items()),
                Mount("/static", StaticFiles(directory=_STATIC)),
            ],
            exception_handlers={
                HTTPException: lambda request, error: _error(
                    error.status_code, error.detail, error.headers
                ),
                UserError: lambda request, error: _error(400, str(error)),
                Exception: lambda request, error: _error(
                    500, "The server failed; its log has the reason."
                ),
            },
            lifespan=self._lifespan,
        )
        self.asgi = _Middleware(starlette, self)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app):
        self.batcher.start()
        yield
        self.stopping = True
        await asyncio.to_thread(self.batcher.stop)

    # --- GET ---

    async def _page(self, request: Request) -> Response:
        return FileResponse(_STATIC / "page.html")

    async def _health(self, request: Request) -> Response:
        ready = self.batcher.ready.is_set()
        status = "stopping" if self.stopping else "ready" if ready else "compiling"
        return JSONResponse({"status": status}, 200 if status == "ready" else 503)

    async def _describe(self, request: Request) -> Response:
        return JSONResponse(_describe(self._model) | {"routes": [*self._functions]})

    async def _report(self, request: Request) -> Response:
        found = prometheus_client.generate_latest(self._metrics.registry)
        return Response(found, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    # --- POST ---

    def _make_endpoint(self, answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            path = request.url.path
            if path not in self._functions:
                need = routes.REQUIREMENTS[path]
                raise HTTPException(404, f"{path} needs {need}; this server has {self._model!r}.")
            return JSONResponse(await answer(await _read_body(request)))

        return respond

    async def _embed(self, body: dict[str, Any]) -> dict[str, Any]:
        texts = body.get("input")
        texts = _read_texts("input", [texts] if isinstance(texts, str) else texts)
        form = body.get("encoding_format", "float")
        if form not in ("float", "base64"):
            raise HTTPException(400, f"encoding_format={form!r} is unknown. Use float or base64.")
        parts = len(POOLINGS[self._model.vectors.pooling])
        width = parts * self._model.networks["main"].encoder.hidden_size
        dimensions = _read_count(body, "dimensions", width)
        found = await self._compute("/v1/embeddings", "input", texts)
        data = []
        for index, (vector, _) in enumerate(found):
            part = vector[:dimensions]
            part = part / np.linalg.norm(part)
            if not np.isfinite(part).all():
                raise HTTPException(500, f"The model returned NaN for input[{index}].")
            little = part.astype("<f4").tobytes()
            embedding = part.tolist() if form == "float" else base64.b64encode(little).decode()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
        tokens = sum(count for _, count in found)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": str(self._model.path), "usage": usage}

    async def _rerank(self, body: dict[str, Any]) -> dict[str, Any]:
        (query,) = _read_texts("query", [body.get("query")])
        documents = _read_texts("documents", body.get("documents"))
        most = _read_count(body, "top_n", None)
        pairs = [(query, document) for document in documents]
        scores = await self._compute("/rerank", "documents", pairs)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [{"index": index, "relevance_score": scores[index]} for index in order]
        return {"results": results[:most]}

    def _make_answer(self, path: str) -> Answer:
        async def answer(body: dict[str, Any]) -> dict[str, Any]:
            texts = _read_texts("texts", body.get("texts"), rows=path == "/predict")
            return {"answers": await self._compute(path, "texts", texts)}

        return answer

    async def _compute(self, path: str, name: str, items: Sequence[Any]) -> list[Any]:
        """Computes items in the queue.

        Args:
          name: field of the request with the items, for messages.

        Raises:
          HTTPException: the queue is full, the time is up, or an item cannot be computed.
        """
        if self.stopping:
            raise HTTPException(503, "The server is stopping.", {"Retry-After": "1"})
        try:
            futures = self.batcher.submit(self._functions[path], items)
        except QueueFullError:
            raise HTTPException(
                503,
                "The queue is full; repeat the request later.",
                {"Retry-After": "1"},
            ) from None
        waiting = [asyncio.wrap_future(future) for future in futures]
        try:
            async with asyncio.timeout(self._timeout):
                found = await asyncio.gather(*waiting, return_exceptions=True)
        except TimeoutError:
            seconds = f"{self._timeout:g} s"
            raise HTTPException(504, f"There was no answer within {seconds}.") from None
        for index, answer in enumerate(found):
            if isinstance(answer, UserError):
                problem = str(answer).removeprefix("texts[0]").strip()
                raise HTTPException(400, f"{name}[{index}]: {problem}")
            if isinstance(answer, BaseException):
                raise answer
            if isinstance(answer, dict) and "error" in answer:
                raise HTTPException(400, f"{name}[{index}] {answer['error']}.")
        return found

    # --- Called by the middleware ---

    def check(self, method: str, path: str, headers: Headers) -> Response | None:
        """Returns the error for a request that must not be answered, or None."""
        if self._local:
            host = headers.get("host", "")
            if not {host, host.rpartition(":")[0]} & {*LOCAL_NAMES}:
                return _error(403, f"Host {host!r} is not a name of this machine.")
        public = path in _PUBLIC or path.startswith("/static/")
        if self._key and not public:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            good = hmac.compare_digest(key.strip().encode("latin-1"), self._key)
            if scheme.lower() != "bearer" or not good:
                message = "The API key is missing or wrong. Send it as Authorization: Bearer KEY."
                return _error(401, message, {"WWW-Authenticate": "Bearer"})
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            return _error(415, f"Content-Type is {kind!r}; send application/json.")
        return None

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Counts an answered request; unknown paths share one label."""
        label = path if path in self._paths else "other"
        self._metrics.requests.labels(label, status).inc()
        self._metrics.seconds.labels(label).observe(seconds)


class _Metrics:
    """Metrics of one server, in their own registry."""

    def __init__(self):
        self.registry = prometheus_client.CollectorRegistry()
        name, own = "convbert_jax", {"registry": self.registry}
        self.requests = prometheus_client.Counter(
            f"{name}_requests", "Answered requests.", ["route", "status"], **own
        )
        self.seconds = prometheus_client.Histogram(
            f"{name}_request_seconds", "Seconds from request to answer.", ["route"], **own
        )
        self.queue = prometheus_client.Gauge(f"{name}_queue_texts", "Waiting texts.", **own)
        sizes = [1 << power for power in range(MAX_BATCH.bit_length())]
        self.batch_size = prometheus_client.Histogram(
            f"{name}_batch_texts", "Texts of a batch.", buckets=sizes, **own
        )


class _Middleware:
    """Middleware: refuses requests, adds security headers and counts requests."""

    def __init__(self, asgi, app: InferenceApp):
        self._asgi, self._app = asgi, app

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._asgi(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_with_headers(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["Content-Security-Policy"] = _POLICY
                headers["X-Content-Type-Options"] = "nosniff"
                if status in (408, 413, 415):  # the rest of the body is not read
                    headers["Connection"] = "close"
            await send(message)

        refusal = self._app.check(scope["method"], scope["path"], Headers(scope=scope))
        try:
            await (refusal or self._asgi)(scope, receive, send_with_headers)
        finally:
            self._app.observe(scope["path"], status, time.perf_counter() - started)


def _error(status: int, message: str, headers=None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


async def _read_body(request: Request) -> dict[str, Any]:
    """Returns the JSON object of a request."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise HTTPException(
                        413,
                        f"The request has more than {MAX_BODY_BYTES:,} bytes. Send fewer texts.",
                    )
    except TimeoutError:
        message = f"The request was not complete after {BODY_SECONDS:g} s."
        raise HTTPException(408, message) from None
    except ClientDisconnect:
        raise HTTPException(400, "The client disconnected.") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:  # thousands of nested brackets
        raise HTTPException(400, f"The request is not JSON: {error}.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, f"The request is a JSON {type(body).__name__}; send an object.")
    return body


def _read_texts(name: str, texts: Any, *, rows: bool = False) -> list[Any]:
    """Checks a list of texts.

    Args:
      name: field of the request, for messages.
      rows: also allow lists of texts and objects, the rows of `Model.predict`.
    """
    if not isinstance(texts, list) or not texts:
        raise HTTPException(400, f'"{name}" must be a list of texts with at least one text.')
    if len(texts) > MAX_TEXTS:
        raise HTTPException(400, f"{name} has {len(texts)} texts; send at most {MAX_TEXTS}.")
    for index, text in enumerate(texts):
        if not isinstance(text, str) and not (rows and isinstance(text, list | dict)):
            kind = type(text).__name__
            raise HTTPException(400, f"{name}[{index}] has the type {kind}; send a text.")
        if isinstance(text, str):
            if not text.strip():
                raise HTTPException(400, f"{name}[{index}] is empty.")
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise HTTPException(
                    400,
                    f"{name}[{index}] contains an unpaired surrogate at character {error.start}. "
                    "Remove or replace it.",
                ) from None
    return [tuple(text) if isinstance(text, list) else text for text in texts]


def _read_count(body: dict[str, Any], name: str, most: int | None) -> int | None:
    """Returns an optional whole number of at least 1 and at most `most`."""
    value = body.get(name)
    if value is None:
        return None
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if not good or (most and value > most):
        bounds = f"from 1 to {most}" if most else "of at least 1"
        raise HTTPException(400, f"{name}={value!r} must be an integer {bounds}.")
    return value


def _describe(model: Model | TextModel) -> dict[str, Any]:
    found: dict[str, Any] = {"name": repr(model).strip("<>")}
    if isinstance(model, TextModel):
        return found | {"recipe": model.config.recipe}
    outputs = model.config.outputs
    if outputs.kind != "span":
        found["length"] = model.length  # longer texts are truncated
    if "predict" in model.abilities:
        found |= {"task": outputs.task, "kind": outputs.kind, "columns": _name_fields(outputs)}
    if "fill_mask" in model.abilities:
        found["mask"] = model.mask_token
    return found


def _name_fields(outputs: OutputsSection) -> list[str]:
    """Returns the names of the text columns in training; generic ones if they had numbers."""
    named = {"tagging": ["words"], "span": ["question", "context"]}
    usual = named.get(outputs.kind, ["text", "second text"])[: outputs.texts]
    pairs = zip(outputs.columns or usual, usual, strict=True)
    return [name if column.lstrip("-").isdecimal() else column for column, name in pairs]
