"""Evaluation of models: predictions, metrics by task, averages and files of results."""
