"""Recipes, which are functions that return an `Experiment` or a `Distillation`.

This folder is installed as the package `synthesizer_jax.recipes`.
"""
