"""Functions for the processes of a run: process groups, signals, and the compilation cache."""
