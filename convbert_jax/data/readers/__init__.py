"""Readers of documents, pairs and rows: text files, tables, Parquet files and data sets."""
