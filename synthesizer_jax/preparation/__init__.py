"""Prepares data: it imports and generates data sets, and writes the tokens that runs read."""
