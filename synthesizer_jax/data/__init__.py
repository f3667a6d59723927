"""Data through SeqIO: vocabularies, tasks, mixtures, importers and batches.

The package imports neither JAX nor the models. TensorFlow and SeqIO are imported on demand, and
nothing here accesses the network.
"""
