"""Models of others that write text, as runs."""
