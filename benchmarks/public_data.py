"""Data sets of the benchmarks: folders below CONVBERT_DATA (default ../shared/data)."""

import os
import sys
from pathlib import Path

# pattern of configs/text.py -> folder
TEXT_FOLDERS = {
    "imdb": "classification/IMDb",
    "trec": "classification/TREC",
    "agnews": "classification/AGNews",
    "sick": "nli/SICK",
    "sick_relatedness": "nli/SICK",
    "snli": "nli/SNLI-devtest",
    "clinc150": "classification/CLINC150",
    "qqp_part": "glue/QQP-part",
}


def folder(name: str = "") -> Path:
    """Returns CONVBERT_DATA, or `name` below it; exits with an error if it does not exist."""
    root = Path(os.environ.get("CONVBERT_DATA", Path("..", "shared", "data"))).expanduser()
    place = root / name
    if not place.is_dir():
        sys.exit(
            f"error: data folder {place} does not exist; set CONVBERT_DATA to the folder with "
            f"{name or 'glue, classification, nli, pretrain and vocab'}."
        )
    return place
