"""Text to token ids and back; what a vocabulary is checked for."""
