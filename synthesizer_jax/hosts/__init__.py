"""Functions for the processes of a run: groups, signals, and the cache of compiled programs."""
