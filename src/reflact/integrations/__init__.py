"""Adapters for other libraries and services."""
