"""What a model says of rows: put together, as answers, files and pictures."""
