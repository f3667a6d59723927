"""Writes HTML pages about runs, with charts that Matplotlib draws."""
