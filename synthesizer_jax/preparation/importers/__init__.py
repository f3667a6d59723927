"""Converts archives, and files that a user names, to TFDS data sets. It needs no network."""
