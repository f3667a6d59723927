"""Evaluates models by predictions, metrics of tasks and averages, and writes the results."""
