"""Imports and generates data sets, and writes the tokens that training runs read."""
