"""The process: its group, signals, memory pages and compilation cache."""
