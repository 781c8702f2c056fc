"""The demo: its answers, and the requests that it refuses."""

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
import urllib.request
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import convbert_jax
from convbert_jax import console
from convbert_jax.config import OutputsSection
from convbert_jax.demo import __main__ as command
from convbert_jax.demo import app as demo
from tests import browser
from tests.conftest import REPOSITORY
from tests.finetuning.conftest import make_config, vocabulary  # noqa: F401
from tests.inference.conftest import models  # noqa: F401
from tests.interop.conftest import make_run  # noqa: F401
from tests.launch.hearing import hear
from tests.refusals import refused


@pytest.fixture(scope="module")
def folder(make_run) -> str:  # noqa: F811
    """A run with a generator and a discriminator with random weights."""
    return str(make_run()[0])


@pytest.fixture(scope="module")
def model(folder):
    return convbert_jax.load(folder)


@pytest.fixture(scope="module")
def client(model):
    return demo.make_app(model).test_client()


def test_answers_are_those_of_the_model(model, client):
    found = client.get("/model").get_json()
    assert found["abilities"] == ["fill_mask", "replaced"]
    text = f"a {found['mask']} b {found['mask']}"
    holes = client.post("/fill_mask", json={"texts": [text]}).get_json()["answer"]
    assert [[token["token"] for token in hole] for hole in holes] == [
        [token["token"] for token in hole] for hole in model.fill_mask(text, top_k=8)
    ]
    (one,) = client.post("/fill_mask", json={"texts": [found["mask"]]}).get_json()["answer"]
    assert len(one) == 8
    tokens = client.post("/replaced", json={"texts": ["a b"]}).get_json()["answer"]
    assert tokens == model.replaced("a b")
    assert client.post("/predict", json={"texts": ["a"]}).status_code == 404


def test_a_model_of_pairs_writes(translated):
    model = convbert_jax.load(translated.folder)
    client = demo.make_app(model).test_client()
    found = client.get("/model").get_json()
    assert (found["abilities"], found["recipe"]) == (["write"], "translation")
    answer = client.post("/write", json={"texts": ["bo ce"]}).get_json()["answer"]
    assert answer == model.write("bo ce")


@pytest.mark.parametrize("kind", ["one", "pair", "number", "tags", "answers"])
def test_fine_tuned_models_predict(models, kind):  # noqa: F811
    model = convbert_jax.load(str(models[kind]))
    client = demo.make_app(model).test_client()
    found = client.get("/model").get_json()
    assert found["abilities"] == ["predict"]
    assert list(found["columns"]) == list(model.config.outputs.columns)
    texts = ["the sun", "a moon under the tree"][: len(found["columns"])]
    answer = client.post("/predict", json={"texts": texts}).get_json()["answer"]
    assert "prediction" in answer, answer
    surrogate = client.post(
        "/predict",
        data='{"texts": ["b\\ud800"%s]}' % (', "a"' * (len(texts) - 1)),
        content_type="application/json",
    ).get_json()["answer"]
    assert "prediction" not in surrogate
    assert "line 1" in surrogate["error"]


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
        found = demo.make_app(model).test_client().get("/model").get_json()
        assert found["columns"] == names


BAD_BODIES = ({}, [], {"texts": []}, {"texts": "a"}, {"texts": [1]}, {"texts": ["", "  "]},
              {"texts": ["no hole"]})  # fmt: skip


def test_bad_requests_are_refused(client):
    codes = [client.post("/fill_mask", json=body) for body in BAD_BODIES]
    codes += [
        client.post("/replaced", data=data, content_type="application/json")
        for data in ("{", "[" * 30_000 + "]" * 30_000)
    ]
    assert {(code.status_code, *code.get_json()) for code in codes} == {(400, "error")}
    large = client.post("/replaced", json={"texts": ["a" * 70_000]})
    assert (large.status_code, *large.get_json()) == (413, "error")
    assert "65,536" in large.get_json()["error"]
    form = client.post("/replaced", data={"texts": "a"})
    assert (form.status_code, *form.get_json()) == (415, "error")


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("127.0.0.1.evil.example:80", 403),
        ("localhost:8123", 200),
        ("[::1]:8123", 200),
    ],
)
def test_only_names_of_this_machine_are_answered(client, host, code):
    """DNS rebinding: another site may point its own host name here."""
    assert client.get("/", headers={"Host": host}).status_code == code
    asked = client.post("/replaced", json={"texts": ["a"]}, headers={"Host": host})
    assert asked.status_code == code


def test_the_page_loads_its_own_files_only(client):
    page = client.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    text = page.get_data(as_text=True)
    for place in re.findall(r'(?:src|href)="(/[^"]+)"', text):
        content = client.get(place)
        assert content.status_code == 200, place
        text += content.get_data(as_text=True)
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write", text)


@settings(max_examples=20)
@given(st.text(max_size=60))
def test_any_text_gets_an_answer_or_an_error(client, text):
    for ability in ("fill_mask", "replaced"):
        response = client.post(f"/{ability}", json={"texts": [text]})
        assert response.status_code in (200, 400), response.get_data(as_text=True)
        assert set(response.get_json()) in ({"answer"}, {"error"})
    if response.status_code == 200:
        for token in response.get_json()["answer"]:
            assert 0 <= token["start"] <= token["end"] <= len(text)


def test_a_port_in_use_is_an_error(client):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with refused(demo.ServerError, field="--port", value=port):
            demo.make_server(client.application, port)


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
    ("arguments", "code", "mentions"),
    [
        (["--workdir=nowhere"], 1, "nowhere"),
        (["--workdir=nowhere", "--port=65536"], 2, "65536"),
        (["--workdir=nowhere", "--port=-1"], 2, "-1"),
    ],
)
def test_a_wrong_command_line_exits_with_an_error(arguments, code, mentions, monkeypatch, capsys):
    monkeypatch.setattr(console, "set_up_logging", lambda: None)  # it would affect other tests
    monkeypatch.setattr(sys, "argv", ["demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == code
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert mentions in line


@contextlib.contextmanager
def served(model) -> Iterator[str]:
    """Yield the address of the page."""
    server = demo.make_server(demo.make_app(model), 0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}/"
    finally:
        server.shutdown()
        thread.join()


def ask(tab: browser.Tab, ability: str, text: str) -> str:
    """Enter a text, press the button and return the answer shown on the page."""
    section = f"document.getElementById({ability!r})"
    tab.evaluate(
        f"{section}.querySelector('textarea').value = {json.dumps(text)};"
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
    with served(model) as address, browser.open_tab(address, tmp_path) as tab:
        tab.wait_for("document.querySelectorAll('section').length == 2")
        shown = tab.evaluate("document.body.textContent")
        assert pathlib.Path(str(model.path)).name in shown
        assert str(model.length) in shown
        assert ask(tab, "fill_mask", f"a {model.mask_token} b").count("%") == 8
        for ability, text in (("fill_mask", " "), ("fill_mask", "a b"), ("replaced", "a" * 70_000)):
            ask(tab, ability, text)
            error = f"document.querySelector('#{ability} .error')"
            assert tab.evaluate(f"{error}.textContent.length") > 0
        for text in (hostile, "\U0001f600 a \u65e5\u672c \u05e9\u05dc \u202e b", "a\x01 b"):
            assert ask(tab, "replaced", text).startswith(text)
        assert ask(tab, "replaced", "a b " * 500).startswith("a b " * 500)
        assert tab.evaluate("document.querySelector('.unread').textContent.length") > 1000
        assert tab.evaluate("document.title") == "convbert_jax"
        script = f"marked('ab b', {json.dumps(tokens)})"
        assert tab.evaluate(f"{script}.textContent") == "ab b"
        marks = f"[...{script}.querySelectorAll('.suspect')].map((mark) => mark.title)"
        assert tab.evaluate(marks) == ["x [UNK]: 75.0 %", "b: 50.0 %"]
        assert tab.errors == []
