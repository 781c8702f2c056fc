"""A fake bucket: a folder that only `epath` finds under gs://bucket.

What goes past `epath`, as `open` and `os` do, ends at a path that does not exist.
"""

import contextlib
import os
import pathlib
import tempfile

import pytest
from etils.epath import backend, gpath
from orbax.checkpoint._src.multihost import multihost
from orbax.checkpoint._src.path import gcs_utils

from convbert_jax import files
from tests import gcs_server


@contextlib.contextmanager
def _written_whole(place, mode, folder):
    """A file to write that is an object at its end, and nothing before."""
    with tempfile.NamedTemporaryFile(mode, delete=False, dir=folder) as file:
        yield file
    os.replace(file.name, place)


class Bucket(backend._OsPathBackend):
    """Objects of gs://bucket as files of a folder; counts what an object store cannot do."""

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
        place.parent.mkdir(parents=True, exist_ok=True)  # there are no folders to make first
        return _written_whole(place, mode, pathlib.Path(self._folder).parent)

    def glob(self, path):
        found = super().glob(self._on_disk(path))
        return [f"gs://bucket{name.removeprefix(str(self._folder))}" for name in found]

    def rename(self, path, dst):
        os.rename(self._on_disk(path), self._on_disk(dst))  # a bucket copies, then deletes

    def replace(self, path, dst):
        raise AssertionError("a bucket cannot rename in one step")


for _name in ("exists", "isdir", "listdir", "makedirs", "mkdir", "rmtree", "remove", "stat"):

    def _translate(self, path, *, _name=_name, **options):
        return getattr(backend._OsPathBackend, _name)(self, self._on_disk(path), **options)

    setattr(Bucket, _name, _translate)


@pytest.fixture
def objects(tmp_path, monkeypatch):
    """The folder whose files are the objects of gs://bucket."""
    folder = tmp_path / "objects"
    folder.mkdir()
    monkeypatch.setattr(files, "_BUCKETS", {"gs": "numpy"})  # stands for the package that is absent
    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", Bucket(folder))
    monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
    return folder


@pytest.fixture
def server(objects, monkeypatch):
    """The same objects for TensorStore, which talks to Google by itself."""
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anyone")
    # asks google.cloud.storage, which comes with gcsfs, for a kind of bucket that has folders
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    # After a save that failed Orbax's threads hold the process so long at its end: 5 minutes else.
    monkeypatch.setattr(multihost, "coordination_timeout", lambda: 20)
    with gcs_server.serving(objects) as server:
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        yield server
