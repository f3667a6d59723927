"""Replacement of parts of a trained model, and distillation of the parts' behavior into replacements."""
