"""The files in the directory of a run: the lock, the record of users' code, and the logs."""
