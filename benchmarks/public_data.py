"""The data sets that benchmarks read: folders below CONVBERT_DATA (default ../shared/data)."""

import os
import sys
from pathlib import Path

# pattern of configs/text.py -> its folder
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
    """CONVBERT_DATA, or `name` below it; ends the program with a sentence where it is absent."""
    root = Path(os.environ.get("CONVBERT_DATA", Path("..", "shared", "data"))).expanduser()
    place = root / name
    if not place.is_dir():
        sys.exit(
            f"error: there is no data folder {place}; set CONVBERT_DATA to the folder that has "
            f"{name or 'glue, classification, nli, pretrain and vocab'}."
        )
    return place
