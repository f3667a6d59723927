"""Implements the command line ``synthesizer-jax``."""
