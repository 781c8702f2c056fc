"""What the packages hand to each other: batches, ids of special tokens, evaluators."""
