"""HTTP server of the demo: answers requests of the page as JSON.

It serves this machine only: the socket is on the loopback interface. Requests with another host
name are refused, because another site can point its own name here (DNS rebinding). Bodies other
than JSON are refused, because another site can send them without a CORS preflight. The page loads
nothing from elsewhere.
"""

import threading
from collections.abc import Callable
from typing import Any

import flask
import werkzeug.serving
from werkzeug import exceptions

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.inference.model import Model, TextModel

_MOST_BYTES = 2**16  # of a request
_USAGE = 'send {"texts": ["a text"]}'
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)


class ServerError(UserError):
    """The page cannot be served."""


def make_app(model: Model | TextModel) -> flask.Flask:
    """Returns the application.

    GET / is the page, GET /model describes the model. POST {"texts": [...]} to /fill_mask,
    /replaced, /predict or /write, whichever the model supports, returns {"answer": ...}. Errors are
    {"error": message}.
    """
    app = flask.Flask("convbert_jax.demo", static_url_path="/static")
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BYTES
    one_at_a_time = threading.Lock()  # a second request would only share the cores

    @app.before_request
    def refuse_strangers():
        name = flask.request.host.rpartition(":")[0] or flask.request.host
        if name not in _HOSTS:
            flask.abort(403, "this server answers its own machine only")

    @app.after_request
    def load_nothing_else(response):
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.errorhandler(exceptions.HTTPException)
    def describe_error(error):
        return {"error": error.description}, error.code

    @app.errorhandler(exceptions.RequestEntityTooLarge)
    def describe_too_large(error):
        return {"error": f"the text is too long: more than {_MOST_BYTES:,} bytes"}, error.code

    @app.errorhandler(UserError)
    def describe_user_error(error):
        return {"error": str(error)}, 400

    @app.get("/")
    def page():
        return app.send_static_file("page.html")

    @app.get("/model")
    def describe():
        return _describe(model)

    def answer_with(answer: Callable[[list[str]], Any]):
        def respond():
            texts = _read_texts()
            with one_at_a_time:
                return {"answer": answer(texts)}

        return respond

    for ability in model.abilities:
        app.post(f"/{ability}", endpoint=ability)(answer_with(_ANSWERS[ability](model)))
    return app


def make_server(app: flask.Flask, port: int) -> werkzeug.serving.BaseWSGIServer:
    """Returns a server on 127.0.0.1; port 0 picks a free one.

    Raises:
      ServerError: the port is taken.
    """
    try:
        return werkzeug.serving.make_server("127.0.0.1", port, app, threaded=True)
    except (OSError, SystemExit):  # werkzeug prints the error and exits
        raise ServerError(
            f"Cannot listen on --port={port}: another program uses it, or it needs more "
            "privileges. Use another port, or 0 for a free one.",
            field="--port",
            value=port,
        ) from None


def _describe(model: Model | TextModel) -> dict[str, Any]:
    found: dict[str, Any] = {"name": repr(model).strip("<>"), "abilities": model.abilities}
    if "write" not in model.abilities and model.config.outputs.kind != "span":
        found["length"] = model.length  # longer texts are truncated
    if "predict" in model.abilities:
        outputs = model.config.outputs
        found |= {"task": outputs.task, "columns": _name_fields(outputs)}
    if "fill_mask" in model.abilities:
        found["mask"] = model.mask_token
    if "write" in model.abilities:
        found["recipe"] = model.config.recipe
    return found


def _name_fields(outputs: OutputsSection) -> list[str]:
    """Returns the names of the text columns in training; generic ones if they had numbers."""
    named = {"tagging": ["words"], "span": ["question", "context"]}
    usual = named.get(outputs.kind, ["text", "second text"])[: outputs.texts]
    pairs = zip(outputs.columns or usual, usual, strict=True)
    return [name if column.lstrip("-").isdecimal() else column for column, name in pairs]


def _read_texts() -> list[str]:
    """Returns the texts of the current request."""
    try:
        given = flask.request.get_json()  # 415 if it is not JSON, 400 if it is malformed
    except RecursionError:  # thousands of nested brackets
        flask.abort(400, _USAGE)
    texts = given.get("texts") if isinstance(given, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        flask.abort(400, _USAGE)
    if not any(text.strip() for text in texts):
        flask.abort(400, "the text is empty")
    return texts


def _fill(model: Model):
    def answer(texts: list[str]) -> list[list[dict[str, Any]]]:
        found = model.fill_mask(texts[0], top_k=min(8, model.tokenizer.vocab_size))
        return found if isinstance(found[0], list) else [found]

    return answer


def _predict(model: Model):
    kind = model.config.outputs.kind

    def answer(texts: list[str]) -> dict[str, Any]:
        if kind == "tagging":
            return model.predict([texts[0].split()])[0]
        return model.predict([tuple(texts) if len(texts) > 1 else texts[0]])[0]

    return answer


_ANSWERS = {
    "fill_mask": _fill,
    "replaced": lambda model: lambda texts: model.replaced(texts[0]),
    "predict": _predict,
    "write": lambda model: lambda texts: model.write(texts[0]),
}
