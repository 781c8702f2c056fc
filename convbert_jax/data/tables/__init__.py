"""Readers of tables: files of labeled text as rows with named columns."""
