"""Tasks: T5's and the papers', those of SeqIO's registries and of users' files, and their preparation.

The package imports neither JAX nor the models; TensorFlow and SeqIO are imported on demand. Nothing here
accesses the network.
"""
