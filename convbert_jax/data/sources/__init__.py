"""Document sources: docstrings, text files, Parquet files, and indexed data sets."""
