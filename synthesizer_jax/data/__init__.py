"""Data through SeqIO: vocabularies, tasks, mixtures, metrics, importers, batches.

Stands alone: it imports nothing of the model. TensorFlow and SeqIO are loaded when they are needed,
and nothing here touches the network.
"""
