"""Measures what layers have learned from their attention weights, and how static these are."""
