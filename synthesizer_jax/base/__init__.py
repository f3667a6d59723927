"""Modules that all other packages use: configurations as JSON, files, messages and types."""
