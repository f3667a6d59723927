"""Recipes: functions that return an `Experiment`."""
