"""Vocabularies, pre-training objectives, prepared tasks, and the batches that training reads.

This package imports neither JAX nor the models nor TensorFlow.
"""
