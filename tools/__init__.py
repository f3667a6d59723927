"""Development tools that generate files of the repository."""
