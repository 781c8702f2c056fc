"""The demo page: what it answers, and whom it does not."""

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
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convbert_jax
from convbert_jax.demo import app as demo
from tests import browser
from tests.conftest import REPOSITORY
from tests.finetuning.conftest import make_config, vocabulary  # noqa: F401
from tests.inference.conftest import models  # noqa: F401
from tests.interop.conftest import make_run  # noqa: F401
from tests.launch.hearing import hear


@pytest.fixture(scope="module")
def folder(make_run) -> str:  # noqa: F811
    """A run with a generator and a discriminator of random weights."""
    return str(make_run()[0])


@pytest.fixture(scope="module")
def model(folder):
    return convbert_jax.load(folder)


@pytest.fixture(scope="module")
def client(model):
    return demo.make_app(model).test_client()


def test_answers_are_those_of_the_model(model, client):
    said = client.get("/model").get_json()
    assert said["abilities"] == ["fill_mask", "replaced"]
    text = f"a {said['mask']} b {said['mask']}"
    holes = client.post("/fill_mask", json={"texts": [text]}).get_json()["answer"]
    assert [[token["token"] for token in hole] for hole in holes] == [
        [token["token"] for token in hole] for hole in model.fill_mask(text, top_k=8)
    ]
    (one,) = client.post("/fill_mask", json={"texts": [said["mask"]]}).get_json()["answer"]
    assert len(one) == 8
    tokens = client.post("/replaced", json={"texts": ["a b"]}).get_json()["answer"]
    assert tokens == model.replaced("a b")


def test_what_a_model_cannot_is_not_there(client):
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 404


@pytest.mark.parametrize("kind", ["one", "pair", "number", "tags", "answers"])
def test_fine_tuned_models_predict(models, kind):  # noqa: F811
    model = convbert_jax.load(str(models[kind]))
    client = demo.make_app(model).test_client()
    said = client.get("/model").get_json()
    assert said["abilities"] == ["predict"]
    assert list(said["columns"]) == list(model.config.outputs.columns)
    texts = ["the sun", "a moon under the tree"][: len(said["columns"])]
    answer = client.post("/predict", json={"texts": texts}).get_json()["answer"]
    assert "prediction" in answer, answer


@pytest.mark.parametrize("kind", ["one", "tags", "answers"])
def test_half_of_a_surrogate_pair_is_a_sentence(models, kind):  # noqa: F811
    client = demo.make_app(convbert_jax.load(str(models[kind]))).test_client()
    texts = '"b\\ud800", "a"' if kind == "answers" else '"b\\ud800"'
    said = client.post(
        "/predict", data=f'{{"texts": [{texts}]}}', content_type="application/json"
    ).get_json()["answer"]
    assert said["error"].startswith("line 1 has half of a surrogate pair at character 1")


def test_columns_without_a_name_are_called_by_their_kind(models):  # noqa: F811
    model = convbert_jax.load(str(models["tags"]))
    for kind, texts, columns, names in (
        ("tagging", 1, ("0",), ["words"]),
        ("tagging", 1, ("tokens",), ["tokens"]),
        ("classification", 2, ("-2", "b"), ["text", "b"]),
        ("span", 2, (), ["question", "context"]),
    ):
        fields = {"kind": kind, "texts": texts, "columns": columns}
        outputs = dataclasses.replace(model.config.outputs, **fields)
        model.config = dataclasses.replace(model.config, outputs=outputs)
        said = demo.make_app(model).test_client().get("/model").get_json()
        assert said["columns"] == names


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "ask with"),
        ([], "ask with"),
        ({"texts": []}, "ask with"),
        ({"texts": "a"}, "ask with"),
        ({"texts": [1]}, "ask with"),
        ({"texts": ["", "  "]}, "there is no text"),
        ({"texts": ["no hole"]}, "does not have a [MASK]"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(client, body, says):
    response = client.post("/fill_mask", json=body)
    assert response.status_code == 400
    assert says in response.get_json()["error"]


def test_a_request_that_is_too_large_or_no_json(client):
    large = client.post("/replaced", json={"texts": ["a" * 70_000]})
    assert (large.status_code, list(large.get_json())) == (413, ["error"])
    assert "send at most 65,536 bytes" in large.get_json()["error"]
    form = client.post("/replaced", data={"texts": "a"})
    assert (form.status_code, list(form.get_json())) == (415, ["error"])
    broken = client.post("/replaced", data="{", content_type="application/json")
    assert (broken.status_code, list(broken.get_json())) == (400, ["error"])
    deep = client.post(
        "/replaced", data="[" * 30_000 + "]" * 30_000, content_type="application/json"
    )
    assert (deep.status_code, list(deep.get_json())) == (400, ["error"])


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example:80"])
def test_strangers_are_refused(client, host):
    """A page of theirs may have a name that leads here."""
    for response in (
        client.get("/", headers={"Host": host}),
        client.post("/replaced", json={"texts": ["a"]}, headers={"Host": host}),
    ):
        assert response.status_code == 403
    assert client.get("/", headers={"Host": "localhost:8123"}).status_code == 200
    assert client.get("/", headers={"Host": "[::1]:8123"}).status_code == 200


def test_the_page_is_its_own(client):
    """Nothing is loaded from elsewhere, and every file that it names is there."""
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    text = page.get_data(as_text=True)
    for place in re.findall(r'(?:src|href)="(/[^"]+)"', text):
        content = client.get(place)
        assert content.status_code == 200, place
        text += content.get_data(as_text=True)
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write", text)


@settings(max_examples=30)
@given(st.text(max_size=60))
def test_any_text_is_answered(client, text):
    """By what was found or a sentence, never by a fault of the program."""
    for ability in ("fill_mask", "replaced"):
        response = client.post(f"/{ability}", json={"texts": [text]})
        assert response.status_code in (200, 400), response.get_data(as_text=True)
        assert set(response.get_json()) in ({"answer"}, {"error"})
    if response.status_code == 200:
        for token in response.get_json()["answer"]:
            assert 0 <= token["start"] <= token["end"] <= len(text)


def test_a_port_that_is_taken_is_a_sentence(model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        app = demo.make_app(model)
        with pytest.raises(demo.ServerError, match=f"--port={port} cannot be listened at"):
            demo.make_server(app, port)


def test_the_program_serves_until_it_is_stopped(folder):
    process = subprocess.Popen(
        [sys.executable, "-m", "convbert_jax.demo", f"--workdir={folder}", "--port=0"],
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
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--workdir=nowhere",), 1, "nowhere"),
        (("--workdir=nowhere", "--port=99999"), 2, "--port=99999 must be between"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments, code, says, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "convbert_jax.demo", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert says in line
    assert "Traceback" not in done.stderr


@contextlib.contextmanager
def served(model) -> Iterator[str]:
    """The address of its page."""
    server = demo.make_server(demo.make_app(model), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.shutdown()
        thread.join()


def ask(tab: browser.Tab, ability: str, text: str) -> str:
    """What the page shows when a person writes the text and presses the button."""
    section = f"document.getElementById({ability!r})"
    tab.evaluate(
        f"{section}.querySelector('textarea').value = {json.dumps(text)};"
        f"{section}.querySelector('button').click()"
    )
    tab.wait_for(f"!{section}.querySelector('button').disabled")
    return tab.evaluate(f"{section}.querySelector('.answer').textContent")


@browser.needs_chromium
def test_a_person_asks_in_a_browser(model, tmp_path):
    """A real one runs the page's script, which asks and draws what the model can."""
    hostile = '<img src=x onerror="document.title = 1"><script>document.title = 2</script>'
    with served(model) as address, browser.open_tab(address, tmp_path) as tab:
        tab.wait_for("document.querySelectorAll('section').length == 2")
        shown = tab.evaluate("document.body.textContent")
        assert "Which word is wrong?" in shown
        assert pathlib.Path(str(model.path)).name in shown
        assert f"the first {model.length} tokens" in shown
        assert ask(tab, "fill_mask", f"a {model.mask_token} b").count("%") == 8
        assert "there is no text" in ask(tab, "fill_mask", " ")
        assert "does not have a" in ask(tab, "fill_mask", "a b")
        assert "too long" in ask(tab, "replaced", "a" * 70_000)
        for text in (hostile, "\U0001f600 a \u65e5\u672c \u05e9\u05dc \u202e b", "a\x01 b"):
            assert ask(tab, "replaced", text).startswith(text)
        assert ask(tab, "replaced", "a b " * 500).startswith("a b " * 500)
        assert tab.evaluate("document.querySelector('.unread').textContent.length") > 1000
        assert tab.evaluate("document.title") == "convbert_jax"
        assert tab.errors == []


@browser.needs_chromium
def test_tokens_that_share_a_character_are_one_mark(model, tmp_path):
    """As those of a character that the vocabulary does not have: the text stands there once."""
    tokens = [
        {"token": "x", "start": 0, "end": 1, "probability": 0.25},
        {"token": "[UNK]", "start": 0, "end": 2, "probability": 0.75},
        {"token": "b", "start": 3, "end": 4, "probability": 0.5},
    ]
    with served(model) as address, browser.open_tab(address, tmp_path) as tab:
        script = f"marked('ab b', {json.dumps(tokens)})"
        assert tab.evaluate(f"{script}.textContent") == "ab b"
        marks = f"[...{script}.querySelectorAll('.suspect')].map((mark) => mark.title)"
        assert tab.evaluate(marks) == ["x [UNK]: 75.0 %", "b: 50.0 %"]
