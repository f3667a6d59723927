"""Preparation of data: importers, synthetic data, and the tokens that training and evaluation read."""
