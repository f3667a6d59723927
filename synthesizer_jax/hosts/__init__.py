"""The processes of a run: their groups, signals, and the cache of compiled programs."""
