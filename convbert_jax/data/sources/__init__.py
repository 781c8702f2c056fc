"""Where documents come from: docstrings, text files, parquet files, data sets by row number."""
