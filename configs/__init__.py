"""Recipes: functions that return an `Experiment` or a `Distillation`."""
