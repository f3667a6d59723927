"""Checkpoints of a run: saving, restoring, verifying, and choosing the checkpoints to keep."""
