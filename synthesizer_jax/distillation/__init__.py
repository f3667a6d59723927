"""Replaces parts of a trained model, and trains the replacements to behave like these parts."""
