"""The command line, ``synthesizer-jax``."""
