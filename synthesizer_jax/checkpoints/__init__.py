"""Checkpoints of a run: saving, restoring, verification and retention."""
