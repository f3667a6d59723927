"""The files in the directory of a run: its lock, its record of users' code, and its logs."""
