"""What a browser asks of a model, and the answers, as JSON.

Only this machine is served: the socket is on the loopback interface, and a request by another name
for it, as a page of a stranger may arrange, is refused; so is one that is not JSON, which such a
page could send without being asked for leave. The page loads nothing from elsewhere.
"""

import threading
from collections.abc import Callable
from typing import Any

import flask
import werkzeug.serving
from werkzeug import exceptions

from convbert_jax.config import OutputsSection, UserError
from convbert_jax.inference.model import Model
from convbert_jax.inference.writing.model import TextModel

_MOST_BYTES = 2**16  # of a request; texts are cut to the model's length besides
_ASK = 'ask with {"texts": ["a text"]}'
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:"
)


class ServerError(UserError):
    """The page cannot be served."""


def make_app(model: Model | TextModel) -> flask.Flask:
    """The page and what it asks: GET / and /model, POST of {"texts": [...]} to /fill_mask,
    /replaced, /predict and /write, as far as the model can. An error is {"error": a sentence}.
    """
    app = flask.Flask("convbert_jax.demo", static_url_path="/static")
    app.config["MAX_CONTENT_LENGTH"] = _MOST_BYTES
    one_at_a_time = threading.Lock()  # a second request would only share the cores

    @app.before_request
    def refuse_strangers():
        name = flask.request.host.rpartition(":")[0] or flask.request.host
        if name not in _HOSTS:
            flask.abort(403, "this page is for the machine that it runs on")

    @app.after_request
    def load_nothing_else(response):
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response

    @app.errorhandler(exceptions.HTTPException)
    def tell(error):
        return {"error": error.description}, error.code

    @app.errorhandler(exceptions.RequestEntityTooLarge)
    def tell_too_large(error):
        return {"error": f"the text is too long; send at most {_MOST_BYTES:,} bytes"}, error.code

    @app.errorhandler(UserError)
    def tell_user(error):
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
    """A server on this machine alone; `port` 0 is a free one.

    Raises:
      ServerError: the port is taken.
    """
    try:
        return werkzeug.serving.make_server("127.0.0.1", port, app, threaded=True)
    except (OSError, SystemExit):  # werkzeug says it on standard error and ends the program
        raise ServerError(
            f"--port={port} cannot be listened at: another program does, or it is not yours to "
            "take; choose another, or 0 for a free one."
        ) from None


def _describe(model: Model | TextModel) -> dict[str, Any]:
    said: dict[str, Any] = {"name": repr(model).strip("<>"), "abilities": model.abilities}
    if "write" not in model.abilities and model.config.outputs.kind != "span":
        said["length"] = model.length  # what is behind it is not read
    if "predict" in model.abilities:
        outputs = model.config.outputs
        said |= {"task": outputs.task, "columns": _name_fields(outputs)}
    if "fill_mask" in model.abilities:
        said["mask"] = model.mask_token
    if "write" in model.abilities:
        said["recipe"] = model.config.recipe
    return said


def _name_fields(outputs: OutputsSection) -> list[str]:
    """What the texts are called: as in training, where they had a name and no number."""
    named = {"tagging": ["words"], "span": ["question", "context"]}
    usual = named.get(outputs.kind, ["text", "second text"])[: outputs.texts]
    found = zip(outputs.columns or usual, usual, strict=True)
    return [name if column.lstrip("-").isdecimal() else column for column, name in found]


def _read_texts() -> list[str]:
    """Of the request at hand, as {"texts": [...]}."""
    try:
        given = flask.request.get_json()  # 415 if it is none, 400 if it is broken
    except RecursionError:  # brackets within brackets, by the thousand
        flask.abort(400, _ASK)
    texts = given.get("texts") if isinstance(given, dict) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        flask.abort(400, _ASK)
    if not any(text.strip() for text in texts):
        flask.abort(400, "there is no text; write one")
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
