"""Executes the notebooks of launch/colab/ and stores their outputs.

    pip install '.[notebooks]' && python launch/notebooks.py     half an hour on two CPU cores
    python launch/notebooks.py translate                         only these

The notebooks run in one temporary folder, because finetune uses the run of pretrain. Log lines
(stderr) are not stored.
"""

import os
import pathlib
import sys
import tempfile

import nbclient
import nbformat

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
    nbformat.write(notebook, file)
    print(f"Executed {file.name}.")


if __name__ == "__main__":
    main()
