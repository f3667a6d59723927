"""Checkpoints of other libraries, and models from directories, ready to use."""

from synthesizer_jax.pretrained.loading import Loaded, encode, generate, load

__all__ = ["Loaded", "encode", "generate", "load"]
