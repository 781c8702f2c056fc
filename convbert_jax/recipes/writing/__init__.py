"""What a trained model that writes text is worth: sets of pairs written and scored."""
