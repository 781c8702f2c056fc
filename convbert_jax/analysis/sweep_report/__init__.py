"""What a sweep found out, with its noise: Markdown, CSV and pictures.

outcome.py     what came out of the cells, as the report takes it
comparison.py  means, intervals, and the test that says "inside" or "outside the noise of seeds"
tables.py      report.md, rows.csv and cells.csv
pictures.py    means.png and curves.png
"""

from etils import epath

from convbert_jax.analysis.sweep_report import comparison, pictures, tables
from convbert_jax.analysis.sweep_report.outcome import CellOutcome, Outcome, RowFacts

__all__ = ["CellOutcome", "Outcome", "RowFacts", "write"]


def write(outcome: Outcome, folder: epath.Path) -> str:
    """Writes all of it into `folder`, in place of what was there.

    Returns:
      the text of report.md.

    Raises:
      OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = comparison.compare_all(outcome)
    drawn = [
        name
        for name, draw in (("means.png", pictures.draw_means), ("curves.png", pictures.draw_curves))
        if draw(outcome, lines, folder / name)
    ]
    tables.write_csv(outcome, lines, folder)
    return tables.write_markdown(outcome, lines, folder, drawn)
