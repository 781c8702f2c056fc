"""Files of labelled text as rows of named columns."""
