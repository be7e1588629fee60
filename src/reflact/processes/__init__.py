"""Processes that run the code of others."""
