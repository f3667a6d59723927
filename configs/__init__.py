"""Recipes, which are functions that return an `Experiment` or a `Distillation`."""
