"""Defines tasks and mixtures of T5, other papers, SeqIO's registries, and users' files."""
