"""Vocabularies, pre-training objectives, prepared tasks, and the batches that training reads.

The package `synthesizer_jax.data` does not import JAX, TensorFlow or the models.
"""
