"""`synthesizer-jax quickstart`."""

from __future__ import annotations


def quickstart() -> None:
    """Placeholder until the embedded mixture lands."""
