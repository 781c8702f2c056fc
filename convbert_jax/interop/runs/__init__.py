"""What conversions need of runs: their vocabularies, and runs of models of others that write."""
