"""Input to predict: lines, JSON or a table, from a file or a stream."""
