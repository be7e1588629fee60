"""Configuration: typed sections, and reading them from files."""
