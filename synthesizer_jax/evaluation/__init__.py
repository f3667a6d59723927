"""Evaluates models: predicts answers, computes the metrics of tasks, and writes the results."""
