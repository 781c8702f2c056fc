"""Upload to the hub, with a substitute for its client."""

import types

import huggingface_hub
import pytest

from convbert_jax.interop import hub
from convbert_jax.interop.networks import ConversionError
from tests.refusals import refused


class Api:
    """Records calls; `error` is raised by the upload."""

    calls: list
    error = None

    def create_repo(self, name, **options):
        self.calls.append(("create", name, options))

    def upload_folder(self, **options):
        self.calls.append(("upload", options["repo_id"], options["folder_path"]))
        if self.error:
            raise self.error
        return types.SimpleNamespace(commit_url="https://hub/commit")


@pytest.fixture
def api(monkeypatch):
    monkeypatch.setattr(Api, "calls", [], raising=False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    return Api


def test_a_folder_is_uploaded_to_a_private_repository(api, tmp_path):
    hub.push(tmp_path, "me/mine")
    created = ("create", "me/mine", {"private": True, "exist_ok": True})
    assert api.calls == [created, ("upload", "me/mine", tmp_path)]


def test_a_refused_upload_is_one_sentence(api, tmp_path, monkeypatch):
    monkeypatch.setattr(Api, "error", OSError("403 Forbidden\nsecond line"))
    with refused(ConversionError, "403 Forbidden", "me/mine", path=tmp_path):
        hub.push(tmp_path, "me/mine")


def test_an_unreachable_hub_is_one_sentence(tmp_path, monkeypatch):
    """The real client, at an address where nothing listens."""
    endpoint = "http://127.0.0.1:9"
    client = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: client(endpoint, token="hf_x"))
    with refused(ConversionError, "me/mine", field="--push_to_hub", path=tmp_path):
        hub.push(tmp_path, "me/mine")


@pytest.mark.parametrize("name", ["mine", "me/mine/more", "me/", "me/a b", ""])
def test_the_name_has_an_owner(name):
    with refused(ConversionError, field="--push_to_hub", value=name):
        hub.check(name)


def test_a_token_is_needed(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with refused(ConversionError, "HF_TOKEN", field="--push_to_hub"):
        hub.check("me/mine")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    hub.check("me/mine")
