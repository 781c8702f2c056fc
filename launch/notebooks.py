"""Executes the notebooks of launch/colab/ and stores their outputs.

    pip install '.[notebooks]' && python launch/notebooks.py     half an hour on two CPU cores
    python launch/notebooks.py translate                         only these

The notebooks run in one temporary folder, because finetune uses the run of pretrain. Log lines
(stderr) are not stored, and pictures are stored small.
"""

import base64
import io
import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat
from PIL import Image

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = ("pretrain", "finetune", "inside", "ablation", "translate")  # in this order


def main() -> None:
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or NOTEBOOKS:
            execute(REPOSITORY / "launch" / "colab" / f"{name}.ipynb", folder)


def execute(file: pathlib.Path, folder: str) -> None:
    """Executes a notebook in a folder and stores its outputs in the file."""
    notebook = nbformat.read(file, as_version=4)
    metadata = notebook.metadata.copy()
    resources = {"metadata": {"path": folder}}
    nbclient.NotebookClient(
        notebook, timeout=None, startup_timeout=600, record_timing=False, resources=resources
    ).execute()
    notebook.metadata = metadata  # without the version of Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if png := output.get("data", {}).pop("image/png", None):
                    output.data["image/jpeg"] = to_jpeg(png)
    nbformat.write(notebook, file)
    print(f"Executed {file.name}.")


def to_jpeg(png: str) -> str:
    """Returns a picture (base64) of at most 1,000 pixels of width, several times smaller."""
    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    picture.thumbnail((1_000, picture.height))
    file = io.BytesIO()
    picture.save(file, format="jpeg", quality=70, optimize=True)
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
