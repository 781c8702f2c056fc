"""Report of a sweep with the variation between seeds: Markdown, CSV and figures.

outcome.py     results of the runs, input of the report
comparison.py  means, confidence intervals, significance tests
tables.py      report.md, variants.csv, runs.csv
figures.py     means.png, curves.png
"""

from etils import epath

from convbert_jax.analysis.sweep_report import comparison, figures, tables
from convbert_jax.analysis.sweep_report.outcome import RunOutcome, SweepOutcome, VariantInfo

__all__ = ["RunOutcome", "SweepOutcome", "VariantInfo", "write"]


def write(outcome: SweepOutcome, folder: epath.Path) -> str:
    """Writes the report into `folder` and returns the text of report.md.

    Raises:
      OSError: the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    comparisons = comparison.compare_all(outcome)
    drawn = []
    if figures.draw_means(outcome, comparisons, folder / "means.png"):
        drawn.append("means.png")
    if figures.draw_curves(outcome, folder / "curves.png"):
        drawn.append("curves.png")
    tables.write_csv(outcome, comparisons, folder)
    return tables.write_markdown(outcome, comparisons, folder, drawn)
