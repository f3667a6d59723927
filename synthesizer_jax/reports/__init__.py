"""HTML pages about runs, with charts by Matplotlib."""
