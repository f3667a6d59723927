"""Checkpoints of T5X that hold a T5."""
