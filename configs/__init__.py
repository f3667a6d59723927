"""Contains recipes. A recipe is a function that returns an `Experiment` or a `Distillation`.

This folder is installed as the package `synthesizer_jax.recipes`.
"""
