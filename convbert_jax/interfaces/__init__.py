"""Types shared by the packages: batches, special token ids, partition rules and evaluators."""
