"""The directory of a run: its lock, its code and its logs."""
