"""The foundation of all other packages: configurations as JSON, files, messages and types."""
