"""The HTTP server: its answers, its limits, and the requests that it refuses."""

import base64
import contextlib
import dataclasses
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

import convbert_jax
from convbert_jax import console
from convbert_jax.config import OutputsSection
from convbert_jax.serve import __main__ as command
from convbert_jax.serve import app as application
from convbert_jax.serve import protocol, routes
from tests import browser
from tests.conftest import REPOSITORY
from tests.finetuning.conftest import make_config, vocabulary  # noqa: F401
from tests.inference.conftest import models  # noqa: F401
from tests.interop.conftest import make_run  # noqa: F401
from tests.launch.hearing import hear
from tests.refusals import refused


@contextlib.contextmanager
def connect(model, **options) -> Iterator[TestClient]:
    """Yields a client of an application, without warm-up."""
    app = application.InferenceApp(model, **{"warm_up": False, **options})
    url = "http://localhost:8000"
    with TestClient(app.asgi, base_url=url, raise_server_exceptions=False) as client:
        yield client


def post(client, path, **body):
    """Returns the JSON of an answer with status 200."""
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def folder(make_run) -> str:  # noqa: F811
    """A run with a generator and a discriminator with random weights."""
    return str(make_run()[0])


@pytest.fixture(scope="module")
def model(folder):
    return convbert_jax.load(folder)


@pytest.fixture(scope="module")
def client(model):
    with connect(model) as client:
        yield client


# --- Answers ---


def test_embeddings_are_those_of_encode_with_length_1(model, client):
    texts = ["a b", "a", "b b b"]
    expected = model.encode(texts)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    answer = post(client, "/v1/embeddings", input=texts, model="any")
    found = [item["embedding"] for item in answer["data"]]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_embeddings_have_the_form_of_openai(model, client):
    answer = post(client, "/v1/embeddings", input="a b")
    tokens = len(model.tokenize("a b"))
    assert answer["object"] == "list"
    assert [(item["object"], item["index"]) for item in answer["data"]] == [("embedding", 0)]
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


def test_embeddings_as_base64_are_the_same(client):
    (floats,) = post(client, "/v1/embeddings", input="a b")["data"]
    (coded,) = post(client, "/v1/embeddings", input="a b", encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(coded["embedding"]), "<f4")
    np.testing.assert_allclose(found, floats["embedding"], atol=1e-6)


def test_shortened_embeddings_have_length_1(client):
    (long,) = post(client, "/v1/embeddings", input="a b")["data"]
    (short,) = post(client, "/v1/embeddings", input="a b", dimensions=4)["data"]
    expected = np.asarray(long["embedding"][:4])
    np.testing.assert_allclose(short["embedding"], expected / np.linalg.norm(expected), atol=1e-5)


def test_masks_are_filled_as_by_the_model(model, client):
    text = f"a {model.mask_token} b {model.mask_token}"
    (masks,) = post(client, "/fill-mask", texts=[text])["answers"]
    assert [[token["token"] for token in mask] for mask in masks] == [
        [token["token"] for token in mask] for mask in model.fill_mask(text, top_k=8)
    ]


def test_replaced_tokens_are_those_of_the_model(model, client):
    (tokens,) = post(client, "/replaced", texts=["a b"])["answers"]
    assert tokens == model.replaced("a b")


def test_a_generative_model_writes(translated):
    model = convbert_jax.load(translated.folder)
    with connect(model, warm_up=True) as client:
        assert client.get("/model").json()["routes"] == ["/write"]
        assert post(client, "/write", texts=["bo ce"])["answers"] == [model.write("bo ce")]
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 404


@pytest.mark.parametrize("kind", ["one", "pair", "number", "tags", "answers"])
def test_predictions_are_those_of_a_fine_tuned_model(models, kind):  # noqa: F811
    model = convbert_jax.load(str(models[kind]))
    columns = model.config.outputs.columns
    texts = ["the sun", "a moon under the tree"][: len(columns)]
    row = texts if len(texts) > 1 else texts[0]
    named = dict(zip(columns, texts, strict=True))
    expected = model.predict([tuple(texts) if len(texts) > 1 else texts[0]])[0]
    with connect(model) as client:
        found = client.get("/model").json()
        assert found["columns"] == list(columns)
        assert "/predict" in found["routes"]
        for answer in post(client, "/predict", texts=[row, named])["answers"]:
            found = answer["prediction"]
            same = pytest.approx(found, rel=1e-5) if kind == "number" else found
            assert same == expected["prediction"]


@pytest.mark.parametrize("kind", ["pair", "number"])
def test_documents_are_sorted_by_score(models, kind):  # noqa: F811
    model = convbert_jax.load(str(models[kind]))
    documents = ["a moon", "under the tree", "fire water"]
    records = model.predict([("the sun", document) for document in documents])
    scores = [
        record.get("probabilities", {}).get("good", record["prediction"]) for record in records
    ]
    with connect(model) as client:
        results = post(client, "/rerank", query="the sun", documents=documents)["results"]
        best = post(client, "/rerank", query="the sun", documents=documents, top_n=1)["results"]
    assert [result["index"] for result in results] == sorted(
        range(3), key=lambda index: -scores[index]
    )
    found = [result["relevance_score"] for result in results]
    np.testing.assert_allclose(found, sorted(scores, reverse=True), atol=1e-4)
    assert best == results[:1]


def test_a_model_of_single_texts_does_not_rerank(models):  # noqa: F811
    with connect(convbert_jax.load(str(models["one"]))) as client:
        response = client.post("/rerank", json={"query": "a", "documents": ["b"]})
    assert response.status_code == 404
    assert "pairs of texts" in response.json()["error"]["message"]


def test_entities_have_the_tags_of_the_model(models):  # noqa: F811
    model = convbert_jax.load(str(models["tags"]))
    text = "  the sun\t under \u65e5\u672c  tree "
    record = model.predict([text.split()])[0]
    with connect(model) as client:
        (entities,) = post(client, "/entities", texts=[text])["answers"]
    words = [
        word for word, tag in zip(text.split(), record["prediction"], strict=True) if tag == "B-X"
    ]
    assert [entity["text"] for entity in entities] == words
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in entities)


def test_columns_without_names_get_generic_ones(models):  # noqa: F811
    model = convbert_jax.load(str(models["tags"]))
    for kind, texts, columns, names in (
        ("tagging", 1, ("0",), ["words"]),
        ("tagging", 1, ("tokens",), ["tokens"]),
        ("classification", 2, ("-2", "b"), ["text", "b"]),
        ("span", 2, (), ["question", "context"]),
    ):
        outputs = OutputsSection(kind=kind, texts=texts, columns=columns)
        model.config = dataclasses.replace(model.config, outputs=outputs)
        with connect(model) as client:
            assert client.get("/model").json()["columns"] == names


# --- Concurrent requests ---


def test_concurrent_requests_get_their_own_answers(model):
    texts = ["a " * n + "b" for n in range(1, 25)]
    with connect(model, max_wait=0.2) as client, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda t: post(client, "/v1/embeddings", input=t), texts))
    expected = model.encode(texts)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    found = [answer["data"][0]["embedding"] for answer in answers]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_faulty_text_fails_alone(model):
    texts = [f"a {model.mask_token}", "no mask", f"b {model.mask_token}"]
    with connect(model, max_wait=0.2) as client, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda t: client.post("/fill-mask", json={"texts": [t]}), texts))
    assert [response.status_code for response in found] == [200, 400, 200]


@pytest.fixture
def blocked(model, monkeypatch):
    """An event; until it is set, /replaced does not return. `begun` is set when it is called."""
    event = threading.Event()
    event.begun = threading.Event()

    def wait(texts):
        event.begun.set()
        event.wait(60)
        return texts

    monkeypatch.setattr(routes, "make_functions", lambda model: {"/replaced": wait})
    yield event
    event.set()


def test_a_full_queue_is_status_503(model):
    with connect(model, queue=2) as client:
        response = client.post("/replaced", json={"texts": ["a"] * 3})
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) > 0


def test_a_late_answer_is_status_504(model, blocked):
    with connect(model, timeout=0.05) as client:
        response = client.post("/replaced", json={"texts": ["a"]})
        assert response.status_code == 504
        assert "0.05 s" in response.json()["error"]["message"]
        blocked.set()
        assert post(client, "/replaced", texts=["b"])["answers"] == ["b"]


def test_an_unexpected_error_is_status_500_without_its_text(model, monkeypatch):
    def fail(texts):
        raise RuntimeError("secret")

    monkeypatch.setattr(routes, "make_functions", lambda model: {"/replaced": fail})
    with connect(model) as client:
        response = client.post("/replaced", json={"texts": ["a"]})
    assert response.status_code == 500
    assert "secret" not in response.text


def test_metrics_count_requests_by_route_and_status(model):
    with connect(model) as client:
        post(client, "/replaced", texts=["a", "b"])
        client.post("/replaced", json={})
        client.get("/unknown")
        text = client.get("/metrics").text
    name = "convbert_jax_requests_total"
    assert f'{name}{{route="/replaced",status="200"}} 1.0' in text
    assert f'{name}{{route="/replaced",status="400"}} 1.0' in text
    assert f'{name}{{route="other",status="404"}} 1.0' in text
    assert "convbert_jax_batch_texts_sum 2.0" in text
    assert "convbert_jax_queue_texts 0.0" in text


# --- Refused requests ---


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {}),
        ("/v1/embeddings", {"input": []}),
        ("/v1/embeddings", {"input": [1]}),
        ("/v1/embeddings", {"input": ["a", " "]}),
        ("/v1/embeddings", {"input": ["a"] * 257}),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}),
        ("/v1/embeddings", {"input": "a", "encoding_format": []}),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}),
        ("/v1/embeddings", {"input": "a", "dimensions": 10_000}),
        ("/v1/embeddings", {"input": "a", "dimensions": True}),
        ("/replaced", []),
        ("/replaced", {"texts": "a"}),
        ("/replaced", {"texts": [["a"]]}),
        ("/fill-mask", {"texts": ["no mask"]}),
    ],
)
def test_a_wrong_body_is_status_400(client, path, body):
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"", b"{", b'{"texts": ["\xff"]}', b"[" * 30_000 + b"]" * 30_000, b"9" * 10_000]
)
def test_a_body_that_is_not_json_is_status_400(client, data):
    response = client.post("/replaced", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "JSON" in response.json()["error"]["message"]


def test_an_unpaired_surrogate_is_named(client):
    response = client.post(
        "/replaced",
        content=b'{"texts": ["a", "b\\ud800"]}',
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 400
    assert "texts[1]" in response.json()["error"]["message"]
    assert "character 1" in response.json()["error"]["message"]


@pytest.mark.parametrize("row", [["the sun", "a"], {"other": "a"}, {}, [1], ["b\ud800"]])
def test_a_row_that_does_not_fit_the_model_is_named(models, row):  # noqa: F811
    with connect(convbert_jax.load(str(models["one"]))) as client:
        response = client.post(
            "/predict",
            content=json.dumps({"texts": ["the sun", row]}),
            headers={"Content-Type": "application/json"},
        )
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith("texts[1] ")


def test_a_large_body_is_status_413(client):
    response = client.post("/replaced", json={"texts": ["a" * 1_100_000]})
    assert response.status_code == 413
    assert "1,048,576" in response.json()["error"]["message"]


def test_a_form_is_status_415(client):
    """A page of another site can send forms without a CORS preflight."""
    assert client.post("/replaced", data={"texts": "a"}).status_code == 415


def test_other_paths_and_methods_are_errors_in_json(client):
    assert client.get("/unknown").json()["error"]["message"]
    assert client.get("/replaced").status_code == 405
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 404


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("", 403),
        ("localhost", 200),
        ("localhost:8123", 200),
        ("[::1]:8123", 200),
        ("[::1]", 200),
    ],
)
def test_only_names_of_this_machine_are_answered(client, host, code):
    """DNS rebinding: another site may point its own host name here."""
    assert client.get("/", headers={"Host": host}).status_code == code
    asked = client.post("/replaced", json={"texts": ["a"]}, headers={"Host": host})
    assert asked.status_code == code


def test_a_public_server_answers_any_name(model):
    with connect(model, local=False) as client:
        assert client.get("/model", headers={"Host": "models.example"}).status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer"}, 401),
        ({"Authorization": "Basic key"}, 401),
        ({"Authorization": "Bearer k\u00e9y".encode()}, 401),
        ({"Authorization": "Bearer key"}, 200),
        ({"Authorization": "bearer key"}, 200),
    ],
)
def test_requests_need_the_api_key(model, headers, code):
    with connect(model, api_key="key") as client:
        for path in ("/model", "/metrics"):
            assert client.get(path, headers=headers).status_code == code
        asked = client.post("/replaced", json={"texts": ["a"]}, headers=headers)
        assert asked.status_code == code
        assert client.get("/health").status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=8), inside),
    max_leaves=6,
)


@settings(max_examples=60)
@given(st.sampled_from(sorted(routes.REQUIREMENTS)), JSON, JSON)
def test_any_json_gets_an_answer_or_status_4xx(client, path, value, other):
    names = {"/v1/embeddings": ("input", "dimensions"), "/rerank": ("documents", "query")}
    first, second = names.get(path, ("texts", "other"))
    for body in (value, {first: value, second: other}, {first: [value]}):
        data = json.dumps(body)
        response = client.post(path, content=data, headers={"Content-Type": "application/json"})
        assert response.status_code == 200 or 400 <= response.status_code < 500, response.text


@settings(max_examples=20)
@given(st.text(max_size=60))
def test_any_text_gets_an_answer_or_status_400(client, text):
    response = client.post("/replaced", json={"texts": [text]})
    assert response.status_code in (200, 400), response.text
    if response.status_code == 200:
        for token in response.json()["answers"][0]:
            assert 0 <= token["start"] <= token["end"] <= len(text)


@settings(max_examples=20)
@given(st.binary(max_size=60))
def test_any_bytes_are_no_error_of_the_server(client, data):
    response = client.post("/replaced", content=data, headers={"Content-Type": "application/json"})
    assert 400 <= response.status_code < 500


def test_the_page_loads_its_own_files_only(client):
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    text = page.text
    for place in re.findall(r'(?:src|href)="(/[^"]+)"', text):
        content = client.get(place)
        assert content.status_code == 200, place
        text += content.text
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write", text)


# --- Connections and processes ---


@contextlib.contextmanager
def served(model, **options) -> Iterator[tuple[int, protocol.uvicorn.Server]]:
    """Yields port and server; stops it at the end."""
    listener = command.listen("127.0.0.1", 0)
    app = application.InferenceApp(model, **{"warm_up": False, **options})
    server = protocol.make_server(app, timeout=60)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive()


def send(port: int, data: bytes) -> bytes:
    """Sends bytes and returns all that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        with connection.makefile("rb") as file, contextlib.suppress(ConnectionResetError):
            return file.read()
    return b""


HEAD = b"POST /replaced HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize("data", [b"", b"P", HEAD])
def test_a_connection_without_a_request_is_closed(model, monkeypatch, data):
    monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.3)
    with served(model) as (port, _):
        assert send(port, data) == b""


def test_a_client_that_does_not_read_the_answer_is_disconnected(model, monkeypatch):
    monkeypatch.setattr(protocol, "_SEND_SECONDS", 0.3)
    functions = {"/replaced": lambda texts: ["a" * 50_000_000]}
    monkeypatch.setattr(routes, "make_functions", lambda model: functions)
    data = HEAD + b'Connection: close\r\nContent-Length: 16\r\n\r\n{"texts": ["a"]}'
    with (
        served(model) as (port, server),
        socket.create_connection(("127.0.0.1", port), timeout=30) as connection,
    ):
        connection.sendall(data)
        connection.recv(1)
        assert server.server_state.connections
        for _ in range(300):
            if not server.server_state.connections:
                break
            time.sleep(0.1)
        assert not server.server_state.connections


def test_a_slow_body_is_status_408(model, monkeypatch):
    monkeypatch.setattr(application, "BODY_SECONDS", 0.3)
    with served(model) as (port, _):
        answer = send(port, HEAD + b"Content-Length: 10\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_a_stop_answers_the_requests_that_wait(model, blocked):
    body = b'{"texts": ["a"]}'
    data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with ThreadPoolExecutor(1) as pool:
        with served(model) as (port, server):
            waiting = pool.submit(send, port, data)
            assert blocked.begun.wait(60)
            server.handle_exit(signal.SIGTERM, None)
            threading.Timer(0.5, blocked.set).start()
        answer = waiting.result()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b'{"answers":["a"]}')


def test_health_is_503_while_stopping(model):
    app = application.InferenceApp(model, warm_up=False)
    with TestClient(app.asgi, base_url="http://localhost") as client:
        assert client.get("/health").json() == {"status": "ready"}
        app.stopping = True
        assert client.get("/health").status_code == 503
        assert client.post("/replaced", json={"texts": ["a"]}).status_code == 503


def test_the_warm_up_compiles_all_programs(folder, monkeypatch):
    model = convbert_jax.load(folder)
    model.length = 12
    make, path = routes.make_functions, "/v1/embeddings"
    monkeypatch.setattr(routes, "make_functions", lambda model: {path: make(model)[path]})
    network = model.network("main")
    with connect(model, warm_up=True) as client:
        while client.get("/health").status_code != 200:
            pass
        compiled = network.programs
        for length in range(1, model.length):
            post(client, path, input=["a " * length] * (7 * length % 40 + 1))
    assert network.programs == compiled


@pytest.mark.parametrize("kind", ["one", "pair", "number", "tags", "answers"])
def test_the_warm_up_predicts_rows_without_errors(models, kind):  # noqa: F811
    model = convbert_jax.load(str(models[kind]))
    functions = {"/predict": routes.make_functions(model)["/predict"]}
    for step in routes.warm_up(model, functions):
        assert all("prediction" in answer for answer in step())


def test_a_port_in_use_is_an_error():
    with command.listen("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with refused(command.ListenError, field="--port", value=port):
            command.listen("127.0.0.1", port)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_serves_until_it_is_stopped(folder, number):
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.serve", f"--workdir={folder}", "--port=0"],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=hear,
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        address = re.search(r"http://127\.0\.0\.1:\d+", line)[0]
        with urllib.request.urlopen(f"{address}/model", timeout=60) as answer:
            assert b"replaced" in answer.read()
    finally:
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "code", "mentions"),
    [
        (["--workdir=nowhere", "--port=0"], 1, "nowhere"),
        (["--workdir=nowhere", "--port=65536"], 2, "65536"),
        (["--workdir=nowhere", "--port=-1"], 2, "-1"),
        (["--workdir=nowhere", "--queue=0"], 2, "--queue=0"),
        (["--workdir=nowhere", "--port=0", "--host=nowhere.invalid"], 1, "nowhere.invalid"),
    ],
)
def test_a_wrong_command_line_exits_with_an_error(arguments, code, mentions, monkeypatch, capsys):
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # it would affect other tests
    monkeypatch.setattr(sys, "argv", ["serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == code
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert mentions in line


# --- The page ---


def ask(tab: browser.Tab, panel: str, *texts: str) -> str:
    """Enters texts, presses the button and returns the answer shown on the page."""
    section = f"document.getElementById({panel!r})"
    tab.evaluate(
        f"{json.dumps(texts)}.forEach((text, i) => "
        f"{{ {section}.querySelectorAll('textarea')[i].value = text; }});"
        f"{section}.querySelector('button').click()"
    )
    tab.wait_for(f"!{section}.querySelector('button').disabled")
    return tab.evaluate(f"{section}.querySelector('.answer').textContent")


@browser.needs_chromium
def test_the_page_in_a_browser(model, tmp_path):
    hostile = '<img src=x onerror="document.title = 1"><script>document.title = 2</script>'
    # The first two share a character, like pieces of a character missing from the vocabulary.
    tokens = [
        {"token": "x", "start": 0, "end": 1, "probability": 0.25},
        {"token": "[UNK]", "start": 0, "end": 2, "probability": 0.75},
        {"token": "b", "start": 3, "end": 4, "probability": 0.5},
    ]
    with served(model) as (port, _), browser.open_tab(f"http://127.0.0.1:{port}/", tmp_path) as tab:
        tab.wait_for("document.querySelectorAll('section').length == 4")
        shown = tab.evaluate("document.body.textContent")
        assert pathlib.Path(str(model.path)).name in shown
        assert str(model.length) in shown
        assert ask(tab, "compare", "a b", "a b").startswith("cosine1.000")
        assert ask(tab, "similar", "b b\na\n\n", "a").startswith("a1.000")
        assert ask(tab, "fill", f"a {model.mask_token} b").count("%") == 8
        for panel, text in (("fill", " "), ("fill", "a b"), ("replaced", "a" * 1_100_000)):
            ask(tab, panel, text)
            error = f"document.querySelector('#{panel} .error')"
            assert tab.evaluate(f"{error}.textContent.length") > 0
        for text in (hostile, "\U0001f600 a \u65e5\u672c \u05e9\u05dc \u202e b", "a\x01 b"):
            assert ask(tab, "replaced", text).startswith(text)
        assert ask(tab, "replaced", "a b " * 500).startswith("a b " * 500)
        assert tab.evaluate("document.querySelector('.unread').textContent.length") > 1000
        assert tab.evaluate("document.title") == "convbert_jax"
        script = f"marked('ab b', together({json.dumps(tokens)}))"
        assert tab.evaluate(f"{script}.textContent") == "ab b"
        marks = f"[...{script}.querySelectorAll('mark')].map((mark) => mark.title)"
        assert tab.evaluate(marks) == ["x [UNK]: 75.0 %", "b: 50.0 %"]
        assert tab.errors == []


@browser.needs_chromium
def test_the_page_asks_for_the_api_key(model, tmp_path):
    address = "http://127.0.0.1:{}/"
    with (
        served(model, api_key="key") as (port, _),
        browser.open_tab(address.format(port), tmp_path) as tab,
    ):
        tab.wait_for("document.querySelector('#key')")
        tab.evaluate(
            "document.querySelector('#key input').value = 'key';"
            "document.querySelector('#key button').click()"
        )
        tab.wait_for("document.querySelectorAll('section').length == 4")
        assert ask(tab, "compare", "a", "a").startswith("cosine1.000")


@browser.needs_chromium
def test_the_page_marks_entities(models, tmp_path):  # noqa: F811
    model = convbert_jax.load(str(models["tags"]))
    text = "the sun under a moon"
    with served(model) as (port, _), browser.open_tab(f"http://127.0.0.1:{port}/", tmp_path) as tab:
        tab.wait_for("document.querySelector('#entities')")
        ask(tab, "entities", text)
        marks = "[...document.querySelectorAll('#entities mark')].map((m) => m.firstChild.data)"
        tags = model.predict(text)["prediction"]
        assert tab.evaluate(marks) == [
            word for word, tag in zip(text.split(), tags, strict=True) if tag == "B-X"
        ]
        assert tab.errors == []
