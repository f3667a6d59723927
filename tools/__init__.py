"""Contains development tools, which generate and check files of the repository."""
