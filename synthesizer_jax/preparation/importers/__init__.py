"""Converts archives and users' files to TFDS data sets, without using a network."""
