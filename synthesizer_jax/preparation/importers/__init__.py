"""Conversion of archives and of files that a user names to TFDS data sets, without a network."""
