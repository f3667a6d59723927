"""Checkpoints of a run: saving, restoring, verifying, and choosing which ones to keep."""
