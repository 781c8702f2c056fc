"""A fake bucket: a folder that only `epath` finds under gs://bucket.

Access that bypasses `epath`, with `open` or `os`, uses a path that does not exist.
"""

import contextlib
import os
import pathlib
import tempfile

import pytest
from etils.epath import backend, gpath
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path import gcs_utils

from convbert_jax import storage
from tests import gcs_server


@contextlib.contextmanager
def _written_whole(place, mode, folder):
    """Opens a file for writing that becomes an object on close."""
    with tempfile.NamedTemporaryFile(mode, delete=False, dir=folder) as file:
        yield file
    os.replace(file.name, place)


class Bucket(backend._OsPathBackend):
    """Objects of gs://bucket as files of a folder; counts operations that object stores lack."""

    def __init__(self, folder):
        self._folder = folder

    def _on_disk(self, path):
        path = str(path)
        assert path.startswith("gs://bucket"), path
        return f"{self._folder}{path.removeprefix('gs://bucket')}"

    def open(self, path, mode):
        assert "a" not in mode, "an object is written whole"
        place = pathlib.Path(self._on_disk(path))
        if "w" not in mode:
            return super().open(place, mode)
        place.parent.mkdir(parents=True, exist_ok=True)  # buckets need no parent folders
        return _written_whole(place, mode, pathlib.Path(self._folder).parent)

    def glob(self, path):
        found = super().glob(self._on_disk(path))
        return [f"gs://bucket{name.removeprefix(str(self._folder))}" for name in found]

    def rename(self, path, dst):
        os.rename(self._on_disk(path), self._on_disk(dst))  # buckets copy and delete instead

    def replace(self, path, dst):
        raise AssertionError("a bucket cannot rename in one step")


for _name in ("exists", "isdir", "listdir", "makedirs", "mkdir", "rmtree", "remove", "stat"):

    def _translate(self, path, *, _name=_name, **options):
        return getattr(backend._OsPathBackend, _name)(self, self._on_disk(path), **options)

    setattr(Bucket, _name, _translate)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """Returns the folder whose files are the objects of gs://bucket."""
    folder = tmp_path / "objects"
    folder.mkdir()
    monkeypatch.setattr(storage, "_BUCKETS", {"gs": "numpy"})  # replaces the missing package
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Bucket(folder))
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    return folder


@pytest.fixture
def server(objects, monkeypatch):
    """Serves the same objects to TensorStore, which calls Google's API directly."""
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anyone")
    # asks google.cloud.storage, installed with gcsfs, whether the bucket has real folders
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    # Otherwise Orbax's threads delay the exit of the process by 5 minutes after a failed save.
    monkeypatch.setattr(multihost, "coordination_timeout", lambda: 20)
    with gcs_server.serving(objects) as server:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        yield server
