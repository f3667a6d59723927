"""Training batches from prepared tasks, pre-training objectives, vocabularies.

The package imports neither JAX nor the models nor TensorFlow.
"""
