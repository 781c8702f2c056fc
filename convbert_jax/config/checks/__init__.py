"""What a config must satisfy before any long work starts."""
