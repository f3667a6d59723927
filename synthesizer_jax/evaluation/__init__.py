"""Evaluation of models: predictions, metrics for each task, averages, and files of results."""
